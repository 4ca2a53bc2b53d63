"""Pre-flight checks of a gateway: whether the model can hold conversations, and something learns what it shall."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.check import Finding
from asyncrl.config.settings import Config
from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.live.conversation import Seam
from asyncrl.live.redaction import redaction_setup
from asyncrl.sandbox.pool import load_problems


def check_gateway(config: Config, base: Path) -> Iterator[Finding]:
    """Return whether conversations can go on from their tokens, and a learner runs where turns are to be learnt."""
    if not config.gateway.count:
        return
    if config.live.share and not config.trains:
        message = f"live turns are learnt, and only {', '.join(config.only)} runs; set only=[], or live.share=0"
        yield Finding(("live.share", "only"), message)
    if ":" in config.live.redact:
        setup = redaction_setup(config.live.redact, base=base, limit_s=config.live.redact_s)
        for problem in filter(None, asyncio.run(load_problems([setup]))):
            yield Finding(("live.redact",), problem)
    path, create = base / config.model.path, config.model.create
    if not config.model.path:
        if not create.template:
            message = "names no model, and one that is made has no chat template; set it to a model directory"
            yield Finding(("model.path", "model.create.template", "gateway.count"), message)
        return
    if not (path / "tokenizer.json").is_file():
        return  # reported where the model itself is checked
    try:
        Seam(TaskTokenizer.load(path))
    except TokenizerError as error:
        yield Finding(("model.path", "gateway.count"), str(error))
