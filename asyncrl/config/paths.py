"""Paths in settings: which settings name files, and the folder that a relative path starts from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.config.reference import join_key
from asyncrl.environment_names import split_path
from asyncrl.models.known import KNOWN, kept_at

_PATH = re.compile(
    r"model\.path|start\.checkpoint|placement\.files|nats\.(credentials|tls_\w+)|.+_file|"
    r"learner\.(teacher|critic)\.model|engine\.groups\.\w+\.model"
)  # settings that are always paths
_MODEL = re.compile(r"model\.path|learner\.(teacher|critic)\.model|engine\.groups\.\w+\.model")
_SPEC = re.compile(
    r"actors|learner\.columns\..+|.+\.(source|eval_source|rollout|reward|function|convert|redact|functions|loss|advantage|filters)"
)  # settings that may name something else
_OPTIONS = re.compile(r"options\.(?!convert\Z)")  # of a source, a loss or a filter, which gives them their meaning
_FILE = re.compile(r"(?!https?://)(?P<path>.+\.(py|jsonl|parquet|toml))([:@].*)?")  # the paths in it


def expand_paths(value: Any, key: str = "", *, base: Path | None = None) -> Any:
    """Return a value of a config with `~` expanded in its paths, and known models as the folders that keep them.

    Args:
        value: of the setting or table `key`, as TOML has it.
        base: folder of the config, where the value was typed as `--set`: its relative paths start from the working
            directory. Below `base` they stay relative, as other hosts have that folder under another path.
    """
    if _OPTIONS.search(key):
        return value
    if isinstance(value, dict):
        return {name: expand_paths(inner, join_key(key, name), base=base) for name, inner in value.items()}
    if isinstance(value, list):
        return [expand_paths(one, key, base=base) for one in value]
    if not isinstance(value, str) or not value:
        return value
    if _MODEL.fullmatch(key) and value in KNOWN:
        return str(kept_at(value))
    if key == "directory":  # relative to the working directory wherever it is written
        return os.path.expanduser(value)
    kind, value = split_path(value) if _SPEC.fullmatch(key) else ("", value)
    if not (kind or _PATH.fullmatch(key) or (_SPEC.fullmatch(key) and _FILE.fullmatch(value))):
        return value
    expanded = os.path.expanduser(value)
    return kind + (expanded if base is None else _below(base, expanded))


def _below(base: Path, expanded: str) -> str:
    """Return a typed path, relative to `base` if it is inside that folder."""
    typed, folder = Path(os.path.abspath(expanded)), base.absolute()
    return str(typed.relative_to(folder) if typed.is_relative_to(folder) else typed)


def named_files(value: Any, key: str = "") -> Iterator[str]:
    """Return the paths of the code and data files in a value of a config, as written.

    Args:
        value: of the setting or table `key`, as TOML has it.
    """
    if _OPTIONS.search(key):
        return
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from named_files(inner, join_key(key, name))
    elif isinstance(value, list):
        for one in value:
            yield from named_files(one, key)
    elif isinstance(value, str) and _SPEC.fullmatch(key) and (found := _FILE.fullmatch(split_path(value)[1])):
        yield found["path"]
