"""The kind of sinks that write a run of Weights & Biases."""

from __future__ import annotations

from typing import ClassVar, Literal

from asyncrl.sinks.sink import MetricsSink, SinkRun, SinkSettings


class WandbSettings(SinkSettings, tag="wandb"):
    """A run of Weights & Biases."""

    package: ClassVar[str] = "wandb"

    project: str = "asyncrl"  # Project of the run.
    entity: str = ""  # User or team that has the project; empty: the one of the API key.
    # `offline`: one file in the run's directory, which `wandb sync` uploads. `online`: rows go to the server during the
    # run, with the API key in `WANDB_API_KEY` or `~/.netrc`.
    mode: Literal["offline", "online"] = "offline"

    def sink(self, run: SinkRun) -> MetricsSink:
        if self.mode == "online":
            from asyncrl.sinks.wandb.online import OnlineSink

            return OnlineSink(run, self.project, self.entity)
        from asyncrl.sinks.wandb.offline import OfflineSink

        return OfflineSink(run, self.project, self.entity)
