"""One line of `asyncrl check`: what works with the model of a config."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.engine_settings import KINDS, EngineKind, kind_of
from asyncrl.config.settings import Config, ModelSettings
from asyncrl.config.trainers import TrainerCapability, trainer_kind
from asyncrl.data.model_dir import ModelError, ModelInfo, model_info
from asyncrl.data.quantisation import quantised_as
from asyncrl.engine.errors import EngineError
from asyncrl.training.megatron.families import packs, read_family
from asyncrl.training.megatron.lora_rows import adaptable

if TYPE_CHECKING:
    from asyncrl.training.document_model import Arrangement


def capability_lines(model: ModelSettings, base: Path) -> Iterator[str]:
    """Name what works with the model, and what does not with the reason."""
    path = base / model.path
    if not model.path:
        return
    info = model_info(path)
    found = {**_trainers(path, info), **_engines(path, info), **_features(path, info)}
    works = [name for name, reason in found.items() if not reason]
    missing = [f"{name} ({reason})" for name, reason in found.items() if reason]
    line = f"{info.architecture} works with {', '.join(works) or 'nothing'}"
    yield f"{line}; not with {', '.join(missing)}" if missing else line


def padding_hints(config: Config, base: Path) -> Iterator[str]:
    """Name a model whose documents cannot be packed."""
    path, pads = base / config.model.path, trainer_kind(config.learner.trainer).can(TrainerCapability.PADS)
    if not config.model.path or not config.trains or not pads:
        return
    arrangement = _arrangement(path, model_info(path))
    if arrangement is not None and not arrangement.packs:
        yield (
            f"learner.micro_batch_tokens: documents in one row would leak in {arrangement.reason}, so each is a padded "
            "row; steps are slower than packed ones, most of all where lengths differ"
        )


def _arrangement(path: Path, info: ModelInfo) -> Arrangement | None:
    """Return how documents are taken by a model that only transformers knows; the other ones are packed."""
    if packs(info.architecture):
        return None
    from asyncrl.training.transformers_model import arrangement_in  # loads torch

    return arrangement_in(path)


def _trainers(path: Path, info: ModelInfo) -> dict[str, str]:
    """Return why trainers do not work, by their names; empty texts if they do."""
    found = {_torch(path, info): "", "megatron": _problem_of_megatron(path)}
    return found if found["megatron"] else {**found, "LoRA with megatron": _problem_of_adapters(path)}


def _torch(path: Path, info: ModelInfo) -> str:
    """Return the torch trainer with the way in which it takes documents."""
    arrangement = _arrangement(path, info)
    if arrangement is None:
        return "torch, packed"
    if not arrangement.packs:
        return "torch, padded"
    apart = ", ".join(sorted(arrangement.apart))
    return f"torch, packed with {apart} once per document" if apart else "torch, packed"


def _problem_of_megatron(path: Path) -> str:
    try:
        read_family(path)
    except (ModelError, EngineError):
        return "no such family"
    return ""


def _problem_of_adapters(path: Path) -> str:
    return "" if "o_proj" in adaptable(*read_family(path)) else "not of latent attention"


def _engines(path: Path, info: ModelInfo) -> dict[str, str]:
    """Return why engines do not serve the model, by their kinds; of kinds that tell."""
    found = {}
    for name in KINDS:
        kind = kind_of(name)
        if kind.architectures:
            found[name] = _problem_of(kind.architectures, info.architecture)
        elif type(kind).check_model is not EngineKind.check_model:
            try:
                kind.check_model(path)
                found[name] = ""
            except EngineError:
                found[name] = "not served"
    return found


def _problem_of(files: str, architecture: str) -> str:
    """Return why an engine does not serve an architecture: see `EngineKind.architectures`."""
    package, _, folder = files.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return "not installed here"
    word = re.compile(rf"\b{re.escape(architecture)}\b")
    found = Path(spec.submodule_search_locations[0], folder).glob("*.py")
    return "" if any(word.search(file.read_text(encoding="utf-8")) for file in found) else "not served"


def _features(path: Path, info: ModelInfo) -> dict[str, str]:
    arrangement = _arrangement(path, info)
    known = arrangement is None
    shares = arrangement is None or arrangement.shares
    replay = "" if known else "its routers cannot follow recorded experts"
    return {
        "LoRA": "",
        "context parallel": "" if arrangement is None else arrangement.undivided,
        "prefix sharing": "" if shares else "layers carry a state, or rows are padded",
        "routing replay": replay if info.experts else "no experts",
        "quantised publication": _problem_of_forms(path),
    }


def _problem_of_forms(path: Path) -> str:
    try:
        form = quantised_as(path, "fp8-blocks")
    except ModelError:
        return "other quantised weights"
    return "" if form is not None and form.names else "no matrices in its layers"
