"""The parts of opening that several kinds of data share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.environments.protocol import DataError
from asyncrl.errors import FunctionError
from asyncrl.functions import load_function


class Wanted(NamedTuple):
    """Data to be opened: the arguments of `asyncrl.data.sources.open_source`."""

    spec: str
    options: dict[str, Any]
    seed: int
    base: Path
    labels_for: str
    row_limit_s: float


def load_data_function(spec: str, base: Path) -> Callable[..., Any]:
    """Import a user's function of data.

    Raises:
        DataError: it cannot be found or loaded.
    """
    try:
        return load_function(spec, base=base)
    except FunctionError as error:
        raise DataError(f"data {spec!r}: {error}") from error
