"""The kinds of sinks. Each has one class, in `kind.py` of its folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, get_args

from asyncrl.sinks.file.kind import FileSettings
from asyncrl.sinks.mlflow.kind import MlflowSettings
from asyncrl.sinks.otlp.kind import OtlpSettings
from asyncrl.sinks.prometheus.kind import PrometheusSettings
from asyncrl.sinks.sink import SinkSettings
from asyncrl.sinks.tensorboard.kind import TensorboardSettings
from asyncrl.sinks.trackio.kind import TrackioSettings
from asyncrl.sinks.wandb.kind import WandbSettings

AnySink: TypeAlias = (
    FileSettings
    | MlflowSettings
    | OtlpSettings
    | PrometheusSettings
    | TensorboardSettings
    | TrackioSettings
    | WandbSettings
)
KINDS: dict[str, type[SinkSettings]] = {str(kind.__struct_config__.tag): kind for kind in get_args(AnySink)}
"""By the names in configs."""


def traced_share(sinks: Sequence[SinkSettings]) -> float:
    """Return the share of trajectories that any of some sinks traces."""
    return max((sink.traced_share for sink in sinks), default=0.0)
