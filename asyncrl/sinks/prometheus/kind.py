"""The kind of sinks that serve the newest figures for Prometheus."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from asyncrl.sinks.sink import MetricsSink, SinkRun, SinkSettings


class PrometheusSettings(SinkSettings, tag="prometheus"):
    """The newest figures at `http://HOST:PORT/metrics`, which Prometheus collects during the run."""

    stores: ClassVar[bool] = False
    package: ClassVar[str] = "prometheus_client"

    host: str = "127.0.0.1"  # Address that the recorder listens on; `0.0.0.0` for all.
    port: Annotated[int, Meta(ge=1, le=65535)] = 9464  # Its port.

    def sink(self, run: SinkRun) -> MetricsSink:
        from asyncrl.sinks.prometheus.sink import PrometheusSink

        return PrometheusSink(run.run, self.host, self.port)
