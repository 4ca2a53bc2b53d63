"""Gauges with the newest figures of a run. Prometheus stores their history."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from asyncrl.sinks.figures import point_of
from asyncrl.sinks.sink import Position, Row


class PrometheusSink:
    """`MetricsSink` of gauges such as `asyncrl_reward_mean{run="demo"}`."""

    def __init__(self, run: str, host: str, port: int) -> None:
        self._run, self._host, self._port = run, host, port
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._stop: Callable[[], None] = lambda: None

    def open(self, _position: Position | None) -> int:
        """See `MetricsSink`: it stores no row, and is given all rows again. Its gauges end with the newest."""
        server, thread = start_http_server(self._port, self._host, self._registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self._stop = stop
        return 0

    def append(self, rows: Sequence[Row]) -> None:
        for row in rows:
            point = point_of(row)
            for name, number in {**point.figures, point.event: float(point.step)}.items():
                self._gauge(name).set(number)

    def _gauge(self, name: str) -> Gauge:
        known = self._gauges.get(name)
        if known is None:
            gauge = Gauge(gauge_name(name), f"{name} of the newest row", ["run"], registry=self._registry)
            known = self._gauges[name] = gauge.labels(self._run)
        return known

    def sync(self) -> int:
        return 0

    def close(self) -> None:
        self._stop()


def gauge_name(figure: str) -> str:
    """Return the name of a figure's gauge, with its unit as Prometheus writes it: `asyncrl_train_wait_seconds`."""
    words = re.sub(r"[^a-zA-Z0-9_]", "_", figure).split("_")
    return "_".join(["asyncrl", *("seconds" if word == "s" else word for word in words)]).replace(
        "per_seconds", "per_second"
    )
