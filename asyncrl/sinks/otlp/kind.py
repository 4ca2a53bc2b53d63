"""The kind of sinks that send traces by OTLP."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from asyncrl.sinks.sink import SinkSettings, TraceSink


class OtlpSettings(SinkSettings, tag="otlp"):
    """A trace of each sampled trajectory, sent to a collector by OTLP over HTTP. It takes no metrics."""

    stores: ClassVar[bool] = False
    traces: ClassVar[bool] = True
    package: ClassVar[str] = "opentelemetry.proto"

    endpoint: str = "http://127.0.0.1:4318"  # Address of the collector, without `/v1/traces`.
    share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.01  # Share of trajectories that are traced.

    @property
    def traced_share(self) -> float:
        return self.share

    def trace_sink(self, run: str) -> TraceSink:
        from asyncrl.sinks.otlp.exporter import OtlpExporter

        return OtlpExporter(self.endpoint, run)
