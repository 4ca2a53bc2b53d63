"""The lines of a TOML file at which its tables and keys are."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

from asyncrl.config.reference import join_key


def key_lines(text: str) -> dict[str, int]:
    """Line of every table and key in a valid TOML text, from 1, by dotted key."""
    found: dict[str, int] = {}
    table, statement, start = "", "", 1
    arrays: dict[str, int] = {}  # tables of each array so far
    for number, line in enumerate(text.split("\n"), 1):
        start = start if statement else number
        statement += line + "\n"
        try:
            paths = list(_paths(tomllib.loads(statement)))
        except tomllib.TOMLDecodeError:
            continue  # the statement continues
        if statement.lstrip().startswith("["):
            table = ""
        for path in paths:
            found.setdefault(join_key(table, path), start)
        if statement.lstrip().startswith("["):
            table = paths[-1]
            if statement.lstrip().startswith("[["):
                arrays[table] = arrays.get(table, -1) + 1
                table = join_key(table, str(arrays[table]))
                found[table] = start
        statement = ""
    return found


def _paths(value: dict[str, Any]) -> Iterator[str]:
    for key, inner in value.items():
        yield key
        if isinstance(inner, dict):
            yield from (join_key(key, path) for path in _paths(inner))
