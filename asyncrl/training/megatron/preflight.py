"""Checks before a megatron trainer starts: its library, and whether the model can be divided. Nothing is loaded."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import msgspec

from asyncrl.config.check_learner import has_critic
from asyncrl.config.finding import Finding
from asyncrl.config.setting_types import changed_keys
from asyncrl.config.settings import Config, CreateModelSettings, LearnerSettings
from asyncrl.data.model_dir import ModelError
from asyncrl.data.tokenizer import SPECIAL_TOKENS
from asyncrl.engine.embedded.config import ModelConfig, RopeConfig
from asyncrl.engine.errors import EngineError
from asyncrl.training.megatron.families import ahead_problem, qwen3, read_family
from asyncrl.training.megatron.lora_rows import adapter_problem
from asyncrl.training.megatron.memory import Training, rank_memory
from asyncrl.training.megatron.parallel_config import layout_of

LIBRARY = "megatron-core"
VERSION = "0.16.1"
FP8 = "transformer-engine"  # whose products in FP8 were run in 2.20.2


def check_megatron(config: Config, base: Path) -> Iterator[Finding]:
    """Return whether the library is there, and divides policy and teacher as the layout says."""
    learner = config.learner
    found = _installed(LIBRARY)
    if found != VERSION:
        message = f'found {found or "no package"}, "megatron" needs {LIBRARY} {VERSION}; install it: pip install -e'
        yield Finding(("learner.trainer",), message + ' ".[megatron]"')
    if learner.dtype == "fp8" and not _installed(FP8):
        message = f'found no package {FP8}, "fp8" needs it; pip install --no-build-isolation {FP8}[pytorch]'
        yield Finding(("learner.dtype",), f'{message}, or set "bfloat16"')
    layout = layout_of(config.learner)
    keys = tuple(f"learner.layout.{key}" for key in changed_keys(learner.layout)) or ("learner.layout.tensor",)
    given = {
        "model.path": config.model.path,
        "learner.teacher.model": learner.teacher.model,
        "learner.critic.model": learner.critic.model,
    }
    if not config.model.path and (problem := layout.problem(_created(config.model.create))):
        yield Finding((*keys, "model.create"), problem)
    for key, path in given.items():
        try:
            problem = layout.problem(read_family(base / path)[1]) if path else ""
        except (ModelError, EngineError) as error:
            problem = str(error)
        if problem:
            yield Finding((key, "learner.trainer", *keys), problem)
        elif key == "model.path" and path:
            yield from _unlike(config.learner, base / path)


def _unlike(learner: LearnerSettings, path: Path) -> Iterator[Finding]:
    """Return whether the model has the parts to train in addition to its layers, or instead."""
    family, shape = read_family(path)
    if learner.lora.rank and (problem := adapter_problem(family, shape, learner.lora.targets)):
        yield Finding(("learner.lora.targets", "learner.trainer"), f"{path}: {problem}")
    if learner.mtp_weight and (problem := ahead_problem(path, shape)):
        yield Finding(("learner.mtp_weight", "model.path"), f"{path}: {problem}; set 0")
    if learner.router_bias_rate and not (shape.experts and shape.experts.corrected):
        message = f"{path}: found no experts whose scores are corrected by biases, which would move; set 0"
        yield Finding(("learner.router_bias_rate", "model.path"), message)


def memory_lines(config: Config, base: Path) -> Iterator[str]:
    """Estimate the memory of the fullest rank, of a model that was checked before."""
    learner = config.learner
    if learner.lora.rank:
        return
    family, shape = (
        read_family(base / config.model.path) if config.model.path else (qwen3.FAMILY, _created(config.model.create))
    )
    shape = msgspec.structs.replace(shape, ahead=learner.mtp_weight > 0)
    training = Training(
        ranks=learner.ranks,
        element=4 if learner.dtype == "float32" else 2,
        tokens=learner.micro_batch_tokens,
        recompute=learner.recompute,
        copies=int(learner.reference.kl_coef > 0),
    )
    found = rank_memory(family, shape, layout_of(config.learner), training)
    yield f"memory of the fullest rank of the learner, estimated: {found}"
    if learner.teacher.model or has_critic(config):
        yield "a teacher's weights and a critic's weights, gradients and optimiser come on top"


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _created(create: CreateModelSettings) -> ModelConfig:
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=len(create.alphabet) + len(SPECIAL_TOKENS),
        hidden=create.hidden,
        intermediate=create.ffn,
        layers=create.layers,
        heads=create.heads,
        kv_heads=create.kv_heads,
        head_dim=create.head_dim,
        norm_eps=1e-6,
        tied=False,
        max_positions=create.context,
        rope=RopeConfig(),
        has_qk_norm=True,
    )
