"""The settings of the megatron trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from asyncrl.training.megatron.layout import Layout


@dataclass(frozen=True, slots=True)
class MegatronSettings:
    """The settings of a `MegatronTrainer`."""

    layout: Layout = field(default_factory=Layout)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights that are computed with and published; their masters and the moments are float32."""
    device: str = "cpu"  # or "cuda": the GPU of the rank
    micro_batch_tokens: int = 4096
    shares: bool = False
    """Whether other processes of the host may read the copied weights; on a GPU they take its memory."""
    recompute: bool = False
    replays: bool = False
    """Whether tokens go to the experts that they went to where they were sampled."""
    threads: int = 1
    eps: float = 1e-8
    teacher: Path | None = None  # directory of the model that fills the column `teacher`
    critic: Path | None = None  # directory of the model that the critic begins as
