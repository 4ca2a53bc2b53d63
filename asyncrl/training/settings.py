"""The settings that every trainer with a model has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asyncrl.config.check_learner import has_critic
from asyncrl.config.settings import Config
from asyncrl.data.quantisation import Quantisation, quantised_as
from asyncrl.training.lora import Lora


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Device and precision of a trainer and its further models."""

    device: str = "cpu"  # "cpu", "cuda" or, with torch, "cuda:N"; the megatron trainer takes the GPU of its rank
    dtype: Literal["float32", "bfloat16", "fp8"] = "float32"
    """Of the products and the published weights, which are bfloat16 with FP8; masters and moments are float32."""
    micro_batch_tokens: int = 4096
    recompute: bool = False
    compiled: bool = False
    """Of each layer and of the loss; for GPUs with bfloat16."""
    shares: bool = False
    """True where other processes of the host may read the copied weights; on a GPU they take its memory."""
    replays: bool = False
    """True if tokens use the experts of the sampler."""
    records: bool = False
    """True where tokens go, in the pass with the gradient, to those that they went to in the pass before the update."""
    quantised: Quantisation | None = None
    """The form of the published weights; the trained ones have `dtype`."""
    offloads: bool = False
    """True where policy and critic leave the device while the other one learns."""
    threads: int = 1
    eps: float = 1e-8
    teacher: Path | None = None  # directory of the model that fills the column `teacher`
    critic: Path | None = None  # directory of the model that the critic begins as
    lora: Lora | None = None  # adapters that are trained instead of all weights


def common_settings(config: Config, model: Path, base: Path) -> dict[str, Any]:
    """Return the fields of `TrainerSettings`."""
    settings, lora = config.learner, config.learner.lora
    return {
        "device": settings.device,
        "dtype": settings.dtype,
        "micro_batch_tokens": settings.micro_batch_tokens,
        "recompute": settings.recompute,
        "compiled": settings.device.startswith("cuda") and settings.dtype != "float32" and settings.compile,
        "replays": settings.routing == "replay",
        "records": settings.routing == "trainer",
        "offloads": settings.offload_idle,
        "shares": config.weights.transport != "never",
        "quantised": quantised_as(model, config.weights.format),
        "teacher": base / settings.teacher.model if settings.teacher.model else None,
        "critic": _critic(config, model, base),
        "lora": Lora(lora.rank, lora.alpha, tuple(lora.targets), lora.publish == "adapter") if lora.rank else None,
    }


def _critic(config: Config, model: Path, base: Path) -> Path | None:
    """Return the directory of the model that the critic begins as."""
    given = config.learner.critic.model
    return (base / given if given else model) if has_critic(config) else None
