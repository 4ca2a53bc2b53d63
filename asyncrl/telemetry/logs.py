"""Structured logs, one JSON object a line with constant events and fields: written by actors, and read as they grow."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncrl.imports import absent

with absent("rich"):  # for tracebacks in a terminal: logs are JSON
    import structlog


def open_log(**bound: Any) -> Any:
    """A logger that writes JSON lines to standard error, with `bound` in every line."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    return structlog.get_logger().bind(**bound)


class Line(NamedTuple):
    """One line of an actor's log."""

    time: str  # ISO 8601 in UTC; a line without a time takes that of the previous line
    actor: str
    level: str
    event: str
    fields: dict[str, Any]


class LogFile:
    """The log of one actor, read as it grows."""

    def __init__(self, path: Path, newest_bytes: int | None = None) -> None:
        """Begin with the newest bytes of the file; None: with its first line."""
        self.path = path
        self.actor = path.name.removesuffix(".log")
        self._at = 0 if newest_bytes is None else max(0, path.stat().st_size - newest_bytes)
        self._time = ""

    def read(self) -> list[Line]:
        """The whole lines that came since the last call."""
        with self.path.open("rb") as file:
            self._at = min(self._at, file.seek(0, os.SEEK_END))  # it may have been cut
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [self._line(raw) for raw in whole.decode(errors="replace").splitlines() if raw.strip()]

    def _line(self, raw: str) -> Line:
        try:
            fields = msgspec.json.decode(raw, type=dict[str, Any])
            time = str(fields.pop("timestamp"))
            datetime.fromisoformat(time)
        except (msgspec.MsgspecError, LookupError, ValueError):
            # Of libraries and a user's functions, which may print their own objects.
            return Line(self._time, self.actor, "info", raw.rstrip(), {})
        self._time = time
        fields.pop("actor", None)
        return Line(self._time, self.actor, str(fields.pop("level", "info")), str(fields.pop("event", "")), fields)
