"""Pre-flight checks of the model, of what trains and serves it, and of the machine, without loading the model."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.filters import FILTERS
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.own_columns import COLUMNS
from asyncrl.config.check_learner import needed_columns
from asyncrl.config.engine_settings import Capability
from asyncrl.config.finding import Finding
from asyncrl.config.learner_settings import EXPERTS
from asyncrl.config.own_algorithms import Named, named_algorithms
from asyncrl.config.settings import Config, LearnerSettings, ModelSettings
from asyncrl.config.staged import as_in
from asyncrl.config.trainers import TrainerCapability, trainer_kind
from asyncrl.data.model_dir import ModelError, check_model_directory, model_info, read_json, tensor_shapes, weight_files
from asyncrl.data.quantisation import read_quantisation
from asyncrl.data.tokenizer import SPECIAL_TOKENS, TaskTokenizer, TokenizerError
from asyncrl.engine.embedded.config import ModelConfig, read_shape
from asyncrl.engine.errors import EngineError
from asyncrl.live.turn_boundary import AUTO, DIFFERENCE, open_boundary
from asyncrl.models.get import HUB_ID
from asyncrl.models.known import KNOWN, kept_at
from asyncrl.torch_gpus import gpus_of_torch
from asyncrl.training.megatron.families import FAMILIES, family_of, packs
from asyncrl.training.megatron.weight_map import EMBEDDING
from asyncrl.weights.tensors import tensors_in
from topics.batches import BatchMember
from topics.trajectories import Reference

_HEAD = "lm_head.weight"  # a critic has another one
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_BIASES = ((".self_attn.", "attention_bias"), (".mlp.", "mlp_bias"))  # which config.json announces
_ROUTER = "gate"  # of tokens to experts
_ROUTED = ".experts."  # in names of tensors of experts, which transformers has in one tensor for all


def check_model(config: Config, base: Path) -> Iterator[Finding]:
    """Return whether the model directory is complete, consistent with its tokenizer, and can be trained and served."""
    if not config.model.path:
        return
    path = base / config.model.path
    if not path.exists() and (get := _get_command(config.model.path)):
        yield Finding(("model.path",), f"found no directory {path}; fetch the model first: {get}")
        return
    try:
        context = check_model_directory(path).context
        for group in config.engine.pools.values():
            group.of_kind.check_model(path)
        _check_weights(path)
        _compare_tokenizer(path)
    except (ModelError, EngineError, TokenizerError) as error:
        yield Finding(("model.path",), str(error))
        return
    for key, tokens in (
        ("rollout.max_new_tokens", config.rollout.max_new_tokens + 1 if config.rolls_out else 0),
        ("engine.context", config.engine.context),
    ):
        if tokens > context:
            message = f"{key} would take {tokens} tokens, and the model at {path} has room for {context}; lower {key}"
            yield Finding((key, "model.path"), message)


def _get_command(path: str) -> str:
    """Return the command that fetches a model named by a known name or a hub id; empty for other paths."""
    if name := next((name for name in KNOWN if Path(path) == kept_at(name)), ""):
        return f"asyncrl model get {name}"
    if not HUB_ID.fullmatch(path):
        return ""
    owner, _, folder = path.partition("/")
    if owner == "models":  # the folder of models in the guides, and no owner on the hub
        return f"asyncrl model get HUB_ID -o {path}"
    return f"asyncrl model get {path} -o {folder}, then model.path = {folder}"


def check_further_models(config: Config, base: Path) -> Iterator[Finding]:
    """Return whether teacher and critic are whole models that read the tokens of the policy."""
    for key, given, replaced in (
        ("learner.teacher.model", config.learner.teacher.model, ""),
        ("learner.critic.model", config.learner.critic.model, _HEAD),
    ):
        try:
            problem = _differs(base / given, _policy_vocabulary(config.model, base), replaced) if given else ""
            problem = problem or (_shorter(base / given, config.rollout.max_new_tokens + 1) if given else "")
        except (ModelError, TokenizerError):
            return  # reported where the model itself is checked
        if problem:
            yield Finding((key, "model.path"), problem)
    for table, group in config.engine.tables.items():
        try:
            if group.model:
                info_of = model_info if group.can(Capability.ADDRESSES) else check_model_directory
                info_of(base / group.model)
                TaskTokenizer.load(base / group.model)
        except (ModelError, TokenizerError) as error:
            yield Finding((f"{table}.model",), str(error))


def check_adapters(config: Config, base: Path) -> Iterator[Finding]:
    """Return whether the model has the projections for the adapters, and engines can add them."""
    lora, path = config.learner.lora, base / config.model.path
    if not lora.rank:
        return
    try:
        form = read_quantisation(path) if config.model.path else None
        if lora.publish == "adapter" and (form is not None or config.weights.format not in ("plain", "model")):
            message = 'adapters are added to no quantised weights; set learner.lora.publish = "merged"'
            yield Finding(("learner.lora.publish", "weights.format", "model.path"), message)
        yield from _adapted_experts(config.learner)
        if not config.model.path:
            return  # a created model has all that can be named
        names = _adaptable(tensor_shapes(path))
    except ModelError:
        return  # reported where the model itself is checked
    if missing := [target for target in lora.targets if target not in names]:
        there = ", ".join(sorted(names)) or "none"
        message = (
            f"the layers of {path} have no {', '.join(missing)} that an adapter can adapt; expected some of {there}"
        )
        yield Finding(("learner.lora.targets", "model.path"), message)


def _adapted_experts(learner: LearnerSettings) -> Iterator[Finding]:
    """Refuse adapters of experts that are published alone."""
    lora = learner.lora
    if EXPERTS in lora.targets and lora.publish == "adapter":
        message = 'engines add no adapters to routed experts; set learner.lora.publish = "merged"'
        yield Finding(("learner.lora.targets", "learner.lora.publish"), message)


def _adaptable(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return the names of `learner.lora.targets` that tensors of a model allow."""
    layers = {name: shape for name, shape in shapes.items() if ".layers." in name}
    routed = {EXPERTS for name in layers if _ROUTED in name}
    matrices = [name for name, shape in layers.items() if _ROUTED not in name and len(shape) == 2]
    return routed | {name.split(".")[-2] for name in matrices if name.endswith(".weight")} - {_ROUTER}


def _differs(path: Path, policy: dict[int, str], replaced: str) -> str:
    """Return why a model is incomplete, or does not read these tokens; empty if it is fine.

    Args:
        replaced: the name of a tensor that is not read.
    """
    try:
        found = check_model_directory(path)
        _check_weights(path, replaced)
        known = TaskTokenizer.load(path).vocabulary
    except (ModelError, EngineError, TokenizerError) as error:
        return str(error)
    if problem := differing_token(path, known, policy):
        return problem
    if found.vocab_size <= max(policy):
        return f"{path} has {found.vocab_size} tokens, the tokenizer ids up to {max(policy)}; name another model"
    return ""


def _shorter(path: Path, tokens: int) -> str:
    """Return why a model takes no row of these tokens; empty if it does. Longer rows are refused as they come."""
    context = check_model_directory(path).context
    message = f"a row would take {tokens} tokens, but the model at {path} takes {context}; lower rollout.max_new_tokens"
    return message if context < tokens else ""


def differing_token(path: Path, known: dict[int, str], policy: dict[int, str]) -> str:
    """Return the first token that differs between a model and the policy; empty if there is none."""
    for number in sorted(policy.keys() | known.keys()):
        if policy.get(number) != known.get(number):
            return (
                f"{path}: token {number} is {known.get(number)!r}, of the trained model it is {policy.get(number)!r}; "
                "it must have the tokenizer of the policy: name a model of the same family"
            )
    return ""


def _policy_vocabulary(model: ModelSettings, base: Path) -> dict[int, str]:
    if model.path:
        return TaskTokenizer.load(base / model.path).vocabulary
    return dict(enumerate([*SPECIAL_TOKENS, *model.create.alphabet]))


def _check_weights(path: Path, replaced: str = "") -> None:
    """Refuse weights that are not those of `config.json`, and a model of which documents cannot be kept apart.

    Args:
        replaced: the name of a tensor that is not read.
    """
    if packs(check_model_directory(path).architecture):
        family, shape = family_of(path)
        _compare_weights(path, {name: one for name, one in family.tensors(shape).items() if name != replaced}, shape)
        return
    # It loads torch and transformers, which takes seconds that models of the families above do not spend.
    from asyncrl.training.transformers_model import check_transformers_model

    check_transformers_model(path, replaced)


def _compare_weights(path: Path, implied: Mapping[str, tuple[int, ...]], shape: ModelConfig) -> None:
    there, layers = tensor_shapes(path), shape.layers + shape.further_layers
    for name, size in implied.items():
        if there.get(name) != size:
            found = f"it is {list(there[name])}" if name in there else "it is missing"
            raise ModelError(
                f"{path}: by config.json {name} is {list(size)}, in the weights {found}; they are of different models"
            )
    beyond = next((name for name in there if name.startswith(f"model.layers.{layers}.")), None)
    if beyond:
        raise ModelError(f"{path}: the weights hold {beyond}, but by config.json there are {layers} layers")
    trunk = (name for name in there if (of := _LAYER.match(name)) and int(of[1]) < shape.layers)
    raw = read_json(path / "config.json")
    if unread := [name for name in trunk if name not in implied and _is_parameter(name, raw)]:
        raise ModelError(
            f"{path}: the weights hold {unread[0]}, but by config.json the layers have no such tensor; they are of "
            "different models"
        )
    if shape.tied and not _is_tied(path):
        raise ModelError(
            f"{path}: by config.json {_HEAD} is tied to the embedding, in the weights it is another one; set "
            "tie_word_embeddings = false there"
        )


def _is_parameter(name: str, raw: Mapping[str, Any]) -> bool:
    """Return whether a tensor changes what a model computes, and `config.json` does not announce it.

    Announced biases are refused if they cannot be computed; scales of quantised weights too.
    """
    announced = name.endswith(".bias") and any(part in name and raw.get(key) for part, key in _BIASES)
    return name.endswith((".weight", ".bias")) and not announced


def _is_tied(path: Path) -> bool:
    """Return whether the head is not among the weights, or is the embedding once more."""
    try:
        held = [tensor for file in weight_files(path) for tensor in tensors_in(file)]
    except ValueError:  # numbers of a form that is refused by its name
        return True
    found = {tensor.name: tensor for tensor in held if tensor.name in (_HEAD, EMBEDDING)}
    return len(found) < 2 or np.array_equal(found[_HEAD].content, found[EMBEDDING].content)


def _compare_tokenizer(path: Path) -> None:
    (number, token), size = TaskTokenizer.load(path).greatest, check_model_directory(path).vocab_size
    if number >= size:
        raise ModelError(
            f"{path}: the tokenizer has the token {token!r} with id {number}, the model has {size} tokens; "
            "the tokenizer is of another model, or the model was not resized for it"
        )


def check_machine(config: Config) -> Iterator[Finding]:
    """Return whether there is here what the settings ask for: GPUs for the learner, the package of the engine.

    What other hosts have for the roles that are placed there, they say as they start.
    """
    device = config.learner.device
    elsewhere = config.placement.elsewhere
    cuda = re.fullmatch(r"cuda(?::(\d+))?", device) if "learner" not in elsewhere else None
    if cuda and trainer_kind(config.learner.trainer).can(TrainerCapability.MODEL):
        count, version = gpus_of_torch({})
        if count is None:
            yield Finding(("learner.device",), f'found "{device}", and torch cannot be asked for GPUs: {version}')
        elif count <= int(cuda[1] or 0):
            message = (
                f'found "{device}", but torch {version} finds {count} GPUs here; set "cpu", or install torch for CUDA'
            )
            yield Finding(("learner.device",), message)
    for table, group in config.engine.tables.items():
        if "engine" not in elsewhere:
            yield from group.of_kind.machine_checks(table, group)
    if config.engine.router.count and importlib.util.find_spec("sglang_router") is None:
        message = "found 1, but there is no package sglang-router here; install it: pip install -e"
        yield Finding(("engine.router.count",), message + ' ".[sglang]"')


_REWARDS = ([0.0, 1.0], [1.0], [0.5] * 4, [0.0, 0.25, 1.0], [-0.5, 2.0])  # shaped ones leave [0, 1]


def check_algorithms(config: Config, _base: Path) -> Iterator[Finding]:
    """Run the contract of `asyncrl/algorithms/contract.py` on each algorithm that is the user's own."""
    own = {(one.key, one.name): one for one in named_algorithms(config) if ":" in one.name}
    for one in own.values():
        if problem := _problem(config, one):
            yield Finding((one.key,), f"{one.name}: {problem}")


def _problem(config: Config, one: Named) -> str:
    # It loads torch, which takes a second that configs without algorithms of the user's own do not spend.
    from asyncrl.algorithms.contract import advantage_problem, column_problem, filter_problem, loss_problem

    if one.table is LOSSES:
        try:
            loss = msgspec.convert(as_in(config, one.stage).learner.loss_options, LOSSES[one.name])
        except msgspec.ValidationError:
            return ""  # its options are a separate problem
        return loss_problem(loss)
    if one.table is COLUMNS:
        return column_problem(COLUMNS[one.name])
    if one.table is FILTERS:
        return filter_problem(FILTERS[one.name](), [_members(rewards) for rewards in _REWARDS])
    return advantage_problem(ADVANTAGES[one.name])


def _members(rewards: list[float]) -> list[BatchMember]:
    return [BatchMember(f"p000000-{i}", 0, Reference(1, "", 1), reward, 5) for i, reward in enumerate(rewards)]


def check_gateway(config: Config, base: Path) -> Iterator[Finding]:
    """Return whether conversations can continue from their tokens, and a learner runs if turns are to be trained."""
    if not config.gateway.count:
        return
    if config.live.fraction and not config.trains:
        message = f"live turns are learnt, and only {', '.join(config.only)} runs; set only=[], or live.fraction=0"
        yield Finding(("live.fraction", "only"), message)
    path, create = base / config.model.path, config.model.create
    if not config.model.path:
        if not create.template:
            message = (
                "no model is named, and one that is made has no chat template; set model.path or model.create.template"
            )
            yield Finding(("model.path", "model.create.template", "gateway.count"), message)
        return
    if not (path / "tokenizer.json").is_file():
        return  # reported where the model itself is checked
    # A gateway that may choose takes a template that is safe by difference, and loading the package takes its time.
    renderer = DIFFERENCE if config.gateway.renderer == AUTO else config.gateway.renderer
    try:
        open_boundary(TaskTokenizer.load(path), renderer)
    except TokenizerError as error:
        yield Finding(("model.path", "gateway.count", "gateway.renderer"), str(error))


def check_routing_replay(config: Config, base: Path) -> Iterator[Finding]:
    """Return whether the model has experts, and engines return which each token went to."""
    wanted = config.learner.routing
    if wanted == "own":
        return
    key, own = "learner.routing", 'or set learner.routing = "own"'
    try:
        architecture = model_info(base / config.model.path).architecture if config.model.path else ""
        if architecture and architecture not in FAMILIES:
            message = f'found "{wanted}", but the routers of {architecture} cannot follow recorded experts; set "own"'
            yield Finding((key, "model.path"), message)
            return
        experts = read_shape(base / config.model.path).experts if config.model.path else None
    except (EngineError, ModelError):
        return  # reported where the model itself is checked
    if experts is None:
        model = f"the model at {base / config.model.path}" if config.model.path else "a made model"
        yield Finding((key, "model.path"), f'found "{wanted}", but {model} has no experts; name one that has, {own}')
    elif experts.chosen < 2:
        message = "a token of this model goes to one expert, whose record cannot be told from a lost one"
        yield Finding((key, "model.path"), f'{message}; set learner.routing = "own"')
    if wanted == "trainer":
        if all(column != "proximal" for _, column in needed_columns(config)):
            message = f"there is no pass before the update whose experts are replayed; let the loss have one, {own}"
            yield Finding((key, "learner.loss"), message)
        return
    if config.engine.router.count:
        yield Finding((key, "engine.router.count"), f"sglang-router drops the request for experts; set 0, {own}")
    for table, group in config.engine.tables.items():
        if not group.can(Capability.EXPERTS):
            message = f'found "{group.kind}", whose servers return no experts; change it, {own}'
            yield Finding((f"{table}.kind", key), message)
        elif switch := group.missing_switch(Capability.EXPERTS):
            message = f"{group.of_kind.title} returns no experts without {switch}; add it to {table}.arguments, {own}"
            yield Finding((f"{table}.arguments", key), message)
