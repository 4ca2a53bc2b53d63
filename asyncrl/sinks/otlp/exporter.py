"""Spans as requests of the OpenTelemetry protocol."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from asyncrl.sinks.sink import SinkError, Span

_LIMIT_S = 10.0  # that a collector may take for one request


class OtlpExporter:
    """Posts spans of one run to a collector. It waits for each answer, so no queue can overflow."""

    def __init__(self, endpoint: str, run: str) -> None:
        self._url = endpoint.rstrip("/") + "/v1/traces"
        self._resource = {"service.name": "asyncrl", "asyncrl.run": run}

    def send(self, spans: Sequence[Span]) -> None:
        """Post spans.

        Raises:
            SinkError: the collector does not take them now.
        """
        headers = {"Content-Type": "application/x-protobuf"}
        request = urllib.request.Request(self._url, self.encoded(spans), headers)
        try:
            with urllib.request.urlopen(request, timeout=_LIMIT_S) as answer:
                answer.read()
        except (OSError, ValueError) as error:
            raise SinkError(f"{self._url} takes no traces: {error}") from error

    def encoded(self, spans: Sequence[Span]) -> bytes:
        """Return an `ExportTraceServiceRequest`."""
        request = ExportTraceServiceRequest()
        resource = request.resource_spans.add()
        resource.resource.attributes.extend(_attributes(self._resource))
        scope = resource.scope_spans.add()
        scope.scope.name = "asyncrl"
        for span in spans:
            scope.spans.append(
                OtlpSpan(
                    trace_id=span.trace,
                    span_id=span.id,
                    parent_span_id=span.parent,
                    name=span.name,
                    kind=OtlpSpan.SPAN_KIND_INTERNAL,
                    start_time_unix_nano=span.begin_ns,
                    end_time_unix_nano=span.end_ns,
                    attributes=_attributes(span.attributes),
                    status=Status(code=Status.STATUS_CODE_ERROR, message=span.error) if span.error else None,
                )
            )
        return bytes(request.SerializeToString())


def _attributes(given: Mapping[str, str | int | float]) -> list[KeyValue]:
    return [KeyValue(key=name, value=_value(value)) for name, value in given.items()]


def _value(value: str | int | float) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    return AnyValue(int_value=value) if isinstance(value, int) else AnyValue(double_value=value)
