"""What checks of a config find."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """Something wrong with one setting, or with several together."""

    keys: tuple[str, ...]  # dotted, of the settings that it is about
    message: str
