"""Settings that were renamed: configs with an old name work and warn; recorded runs keep their old names."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import msgspec

from asyncrl.config.settings import Config

RENAMED = {  # old key: new key; NAME stands for any name
    "autoscale.pools.NAME.least": "autoscale.pools.NAME.min",
    "autoscale.pools.NAME.most": "autoscale.pools.NAME.max",
    "buffer.ahead": "buffer.max_batches_ahead",
    "buffer.most_dropped": "buffer.max_dropped_groups",
    "gateway.alive_s": "gateway.keepalive_s",
    "gateway.gap_s": "gateway.idle_wait_s",
    "gateway.hold_s": "gateway.queue_timeout_s",
    "live.share": "live.fraction",
    "placement.share": "placement.colocate",
    "supervision.spares": "supervision.standbys",
    "weights.direct": "weights.transport",
    "weights.direct_deadline_s": "weights.transport_deadline_s",
}
_VALUES = {("placement.colocate", "turns"): "time_slice"}


def current_names(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return settings under their current names, and each old key that was found with its new key.

    Args:
        settings: tables of a config as TOML or a recorded run has them. They are not changed.
    """
    current, found = copy.deepcopy(settings), dict[str, str]()
    for old, new in RENAMED.items():
        *path, last = old.split(".")
        for key, table in _tables(current, path):
            name = new.rpartition(".")[2]
            if last in table and name not in table:
                value = table.pop(last)
                table[name] = _VALUES.get((new, value), value) if isinstance(value, str) else value
                found[f"{key}.{last}"] = f"{key}.{name}"
    return current, found


def current_key(key: str) -> str:
    """Return the current name of a dotted key."""
    parts = key.split(".")
    for old, new in RENAMED.items():
        pattern = old.split(".")
        if len(pattern) == len(parts) and all(one in ("NAME", part) for one, part in zip(pattern, parts, strict=True)):
            return ".".join([*parts[:-1], new.rpartition(".")[2]])
    return key


def read_settings(settings: dict[str, Any]) -> Config:
    """Return the config of a recorded run.

    Raises:
        msgspec.ValidationError: the settings are not those of a run.
    """
    return msgspec.convert(current_names(settings)[0], Config)


def _tables(table: Any, path: list[str], key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(table, dict):
        return
    if not path:
        yield key, table
        return
    names = list(table) if path[0] == "NAME" else [path[0]] if path[0] in table else []
    for name in names:
        yield from _tables(table[name], path[1:], f"{key}.{name}".removeprefix("."))
