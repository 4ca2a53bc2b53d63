"""Requests that ask for a version of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from asyncrl.engine.errors import EngineRefused
from topics.engines import version_of

LEAST, EXACT = "X-Weight-Version-Min", "X-Weight-Version-Exact"
"""Headers of a request: the least version that may answer it, or the only one."""


class Absent(NamedTuple):
    """The version that a request asks for is not here; asked again, here or elsewhere, it may be."""

    status: int  # 503 where it may still come to this engine, 409 where this engine is past it
    message: str


def absent(label: str, headers: Mapping[str, str]) -> Absent | None:
    """Compare what a request asks for with the weights that are served; None where they may answer it.

    Args:
        label: of the weights, `lineage:version:digest`; any other text is no version.

    Raises:
        EngineRefused: a header names no version.
    """
    least, exact = (_wanted(headers, name) for name in (LEAST, EXACT))
    if least is None and exact is None:
        return None
    try:
        version = version_of(label)[1]
    except ValueError:
        return Absent(503, f"the weights are {label!r}, of no version yet")
    for wanted, text in ((least, f"{least} or newer"), (exact, f"{exact} alone")):
        if wanted is not None and version < wanted:
            return Absent(503, f"the weights have version {version}, the request asks for {text}")
    if exact is not None and version > exact:
        return Absent(409, f"the weights have version {version}, the request asks for {exact} alone")
    return None


def _wanted(headers: Mapping[str, str], name: str) -> int | None:
    given = headers.get(name)
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) <= 18):
        raise EngineRefused(f"{name}: {given[:80]!r}: expected the number of a version, 0 or more")
    return int(given)
