"""The inputs of a run: copies of the user's code, and digests of the data files."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec

from asyncrl.config.paths import named_files
from asyncrl.config.settings import Config
from asyncrl.errors import LaunchError
from asyncrl.files import write_json
from asyncrl.own_code import CODE, INPUTS, InputFile, Inputs, read_inputs
from asyncrl.weights.tensors import at_once, file_record

_CODE = ".py"
_OUTSIDE = "outside"  # folder of the copies of files that are not below the folder of the config


class Accepted(NamedTuple):
    """Changes of its inputs that a resumed run takes."""

    data: bool = False  # `--accept-data`
    code: bool = False  # `--refresh-code`


NOTHING = Accepted()


def find_inputs(config: Config, base: Path) -> Inputs:
    """Return the present files that a config names, and the local modules that its code imports.

    Raises:
        OSError: a file cannot be read.
    """
    base = base.resolve()
    names = {
        os.path.normpath(base / name): str((base / name).resolve()) for name in named_files(msgspec.to_builtins(config))
    }
    named = [Path(path) for path in dict.fromkeys(names.values()) if os.path.isfile(path)]
    code = with_imports([path for path in named if path.suffix == _CODE])
    data = [path for path in named if path.suffix != _CODE]
    known = {path: other for path, other in names.items() if path != other}
    return Inputs(str(base), at_once(lambda path: _described(path, base), code), at_once(_described, data), known)


def _described(path: Path, base: Path | None = None) -> InputFile:
    record, copy = file_record(path), ""
    if base is not None:
        copy = str(path.relative_to(base) if path.is_relative_to(base) else Path(_OUTSIDE, *path.parts[1:]))
    return InputFile(str(path), record.xxh3, record.bytes, copy)


def with_imports(files: Sequence[Path]) -> list[Path]:
    """Return user files with the modules next to them that they import; of a package all its modules."""
    folders = list(dict.fromkeys(path.parent for path in files))
    found = dict.fromkeys(files)
    waiting = list(files)
    while waiting:
        for name in _imported(waiting.pop()):
            if not _is_installed(name, folders):
                new = [path for folder in folders for path in _modules(folder, name) if path not in found]
                found.update(dict.fromkeys(new))
                waiting += new
    return list(found)


def _imported(path: Path) -> set[str]:
    """Return the first names of the modules that a file imports, anywhere in it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return set()  # its import reports the fault
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names}


def _is_installed(name: str, folders: Sequence[Path]) -> bool:
    """Return whether an import finds a module of this name that is not next to the user's files."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
    return spec is not None and not any(
        Path(place).is_relative_to(folder) for place in places if place for folder in folders
    )


def _modules(folder: Path, name: str) -> Iterator[Path]:
    yield from (path for path in [folder / f"{name}.py"] if path.is_file())
    yield from sorted((folder / name).rglob("*.py"))


def take_inputs(root: Path, config: Config, base: Path, accepted: Accepted = NOTHING) -> list[str]:
    """Give a run directory copies of the user's code and the digests of the data; a resumed run keeps its own.

    Args:
        root: run directory.
        base: folder that relative paths of the config start from.

    Returns:
        How the files differ from those that the run began with, a line for each.

    Raises:
        LaunchError: data differs and is not accepted, or a copy is damaged.
        DamagedFile: `inputs.json` of the run cannot be read.
        OSError: a file cannot be read or written.
    """
    before, now = read_inputs(root), find_inputs(config, base)
    if before is None:
        _write(root, now, now.code)
        return []
    lines = _compare_data(before, now, accepted)
    changed = _differing(before.code, now.code)
    damaged = [file for file in before.code if _is_damaged(root, file)]
    if accepted.code and (changed or damaged):
        if (root / CODE).exists():
            (root / CODE).rename(next(path for number in count(1) if not (path := root / f"{CODE}-{number}").exists()))
        _write(root, now, now.code)
        refreshed = dict.fromkeys([*changed, *(file.path for file in damaged)])
        return [*lines, *(f"code {path} is refreshed" for path in refreshed)]
    for file in damaged:
        raise LaunchError(
            f"{root / CODE / file.copy} is not the copy of {file.path} that the run made, expected xxh3 {file.digest}; "
            "put that copy back, or take the present files with --refresh-code"
        )
    new = [file for file in now.code if file.path not in before.digests]
    kept = msgspec.structs.replace(now, code=[*before.code, *new], names=before.names | now.names)
    _write(root, kept, new)
    return [
        *lines,
        *(f"code {path} differs; the run keeps its copy (--refresh-code takes the file)" for path in changed),
    ]


def _differing(before: Sequence[InputFile], now: Sequence[InputFile]) -> list[str]:
    """Return the paths of files whose content changed, or that are gone."""
    digests = {file.path: file.digest for file in now}
    return [file.path for file in before if digests.get(file.path) != file.digest]


def _compare_data(before: Inputs, now: Inputs, accepted: Accepted) -> list[str]:
    changed, sizes = _differing(before.data, now.data), {file.path: file.bytes for file in now.data}
    for file in [file for file in before.data if file.path in changed and not (accepted.data and file.path in sizes)]:
        found = f"found {sizes[file.path]:,} bytes of other content" if file.path in sizes else "the file is gone"
        raise LaunchError(
            f"data {file.path} is not the file that the run began with: {found}, expected {file.bytes:,} bytes with "
            f"xxh3 {file.digest}; put that file back, or accept the present one with --accept-data"
        )
    return [f"data {path} differs; the run continues with it" for path in changed]


def _is_damaged(root: Path, file: InputFile) -> bool:
    copy = root / CODE / file.copy
    return not copy.is_file() or file_record(copy).xxh3 != file.digest


def _write(root: Path, inputs: Inputs, new: Sequence[InputFile]) -> None:
    for file in new:
        copy = root / CODE / file.copy
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.path, copy)
    write_json(root / INPUTS, inputs)


def is_data(path: str) -> bool:
    """Return whether an input of a run is data, not code."""
    return not path.endswith(_CODE)


def changed_data(digests: Mapping[str, str]) -> list[str]:
    """Return the data files on this machine whose content is not that of a run any more.

    Args:
        digests: of the run's inputs, by path.
    """
    paths = [Path(path) for path in digests if is_data(path) and os.path.isfile(path)]
    records = at_once(file_record, paths)
    return [str(path) for path, record in zip(paths, records, strict=True) if record.xxh3 != digests[str(path)]]
