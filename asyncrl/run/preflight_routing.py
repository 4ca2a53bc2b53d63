"""Pre-flight checks of routing replay: whether engines return what the trainer replays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.check import Finding
from asyncrl.config.settings import Config
from asyncrl.engine.embedded.config import read_shape
from asyncrl.engine.errors import EngineError

_FLAG = "--enable-return-routed-experts"


def check_routing_replay(config: Config, base: Path) -> Iterator[Finding]:
    """Return whether the model has experts, and engines tell which each token went to."""
    if config.learner.routing != "replay":
        return
    key, own = "learner.routing", 'or set learner.routing = "own"'
    try:
        experts = read_shape(base / config.model.path).experts if config.model.path else None
    except EngineError:
        return  # reported where the model itself is checked
    if experts is None:
        model = f"the model at {base / config.model.path}" if config.model.path else "a made model"
        yield Finding((key, "model.path"), f'found "replay", but {model} has no experts; name one that has, {own}')
    elif experts.chosen < 2:
        message = "a token of this model goes to one expert, whose record cannot be told from a lost one"
        yield Finding((key, "model.path"), f'{message}; set learner.routing = "own"')
    if config.learner.packing != "packed":
        yield Finding((key, "learner.packing"), f'routing is replayed in packed rows alone; set "packed", {own}')
    if config.engine.router.count:
        yield Finding((key, "engine.router.count"), f"sglang-router drops the request for experts; set 0, {own}")
    for table, group in config.engine.tables.items():
        if group.kind == "sglang" and not group.addresses and _FLAG not in group.arguments:
            message = f"SGLang returns no experts without {_FLAG}; add it to {table}.arguments, {own}"
            yield Finding((f"{table}.arguments", key), message)
