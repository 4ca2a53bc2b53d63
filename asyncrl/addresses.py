"""The form of addresses."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_address(text: str, *schemes: str) -> bool:
    """Return whether a text is a URL of one of these schemes."""
    try:
        parts = urlsplit(text)
        return parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a bracket left open
        return False
