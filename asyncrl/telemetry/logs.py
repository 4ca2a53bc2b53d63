"""Structured logs: constant events with fields, one JSON object a line, run and actor bound."""

from __future__ import annotations

import sys
from typing import Any

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
