"""The kinds of sinks. Each has one class, in `kind.py` of its folder."""

from __future__ import annotations

from typing import TypeAlias, get_args

from asyncrl.sinks.file.kind import FileSettings
from asyncrl.sinks.mlflow.kind import MlflowSettings
from asyncrl.sinks.prometheus.kind import PrometheusSettings
from asyncrl.sinks.sink import SinkSettings
from asyncrl.sinks.tensorboard.kind import TensorboardSettings
from asyncrl.sinks.trackio.kind import TrackioSettings
from asyncrl.sinks.wandb.kind import WandbSettings

AnySink: TypeAlias = (
    FileSettings | MlflowSettings | PrometheusSettings | TensorboardSettings | TrackioSettings | WandbSettings
)
KINDS: dict[str, type[SinkSettings]] = {str(kind.__struct_config__.tag): kind for kind in get_args(AnySink)}
"""By the names in configs."""
