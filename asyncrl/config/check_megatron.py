"""Settings that the megatron trainer does not have, or that contradict its layout."""

from __future__ import annotations

import math
from collections.abc import Iterator

from asyncrl.config.check import Finding
from asyncrl.config.setting_types import changed_keys
from asyncrl.config.settings import Config


def megatron_contradictions(config: Config) -> Iterator[Finding]:
    """Settings that only one of the trainers has, and a number of ranks that its layout does not divide."""
    learner = config.learner
    if learner.trainer != "megatron":
        if changed := changed_keys(learner.layout):
            keys = (*(f"learner.layout.{key}" for key in changed), "learner.trainer")
            yield Finding(keys, f'has no effect with learner.trainer = "{learner.trainer}"; set "megatron"')
        return
    sizes = {key: getattr(learner.layout, key) for key in ("tensor", "context", "pipeline")}
    stage = learner.ranks // learner.layout.pipeline
    if learner.ranks % (ranks := math.prod(sizes.values())):
        product = " times ".join(f"{key} = {size}" for key, size in sizes.items() if size > 1)
        message = f"found {learner.ranks} ranks, expected a multiple of {ranks}: {product} ranks hold one model"
        yield Finding((*(f"learner.layout.{key}" for key in sizes), "learner.ranks"), message)
    elif stage % learner.layout.expert:
        message = f"found {learner.layout.expert}, expected a divisor of the {stage} ranks of a stage, which share them"
        yield Finding(("learner.layout.expert", "learner.ranks"), message)
    for key, found, wanted in (
        ("learner.packing", learner.packing != "packed", "packed rows alone"),
        ("learner.moments", learner.moments != "float32", "moments in float32 alone"),
        ("learner.activations", learner.activations < 1.0, "no such share; `learner.recompute` is its way"),
        ("learner.lora.rank", learner.lora.rank > 0, "no adapters"),
    ):
        if found:
            message = f'the trainer "megatron" has {wanted}; change it, or set learner.trainer = "torch"'
            yield Finding((key, "learner.trainer"), message)
