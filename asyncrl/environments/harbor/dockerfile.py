"""The files that a Dockerfile copies, for sandboxes that take the programs of the machine in place of an image."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from asyncrl.environments.protocol import DataError

ROOT = ".harbor/root"
"""Folder of the workspace with the files that lie outside the working folder of a task."""

_KNOWN = {"FROM", "WORKDIR", "COPY", "ADD", "LABEL", "MAINTAINER", "CMD", "ENTRYPOINT"}
_SYSTEM = {"bin", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr", "workspace"}


class Built(NamedTuple):
    """The files of an image that come from the build context."""

    folder: str  # the working folder, an absolute path; "" if none is named
    files: dict[str, Path]  # by their paths in the workspace
    links: dict[str, str]  # folders of the workspace by absolute paths
    skipped: list[str]  # instructions without effect


def read_dockerfile(path: Path, *, copies: bool = True) -> Built:
    """Read `WORKDIR`, `COPY` and `ADD` of a Dockerfile.

    Args:
        copies: whether to read `COPY` and `ADD`.

    Raises:
        DataError: a file that it copies is absent, or would replace one of the system.
    """
    built = Built("", {}, {}, [])
    for line in re.sub(r"\\\n", " ", path.read_text()).splitlines():
        word, _, rest = line.strip().partition(" ")
        word = word.upper()
        if not word or word.startswith("#"):
            continue
        if word == "WORKDIR":
            built = built._replace(folder=posixpath.join(built.folder or "/", rest.strip()))
        elif word in ("COPY", "ADD"):
            if copies:
                _copy(path, rest, built)
        elif word not in _KNOWN:
            built.skipped.append(line.strip())
    return built


def _copy(path: Path, rest: str, built: Built) -> None:
    words = json.loads(rest) if rest.lstrip().startswith("[") else shlex.split(rest)
    *sources, target = [word for word in words if not word.startswith("--")]
    target_path = posixpath.join(built.folder or "/", target)
    for source in sources:
        found = path.parent / source.lstrip("/")
        if not found.exists():
            raise DataError(f"{path} copies {source}, which is not in {path.parent}")
        if found.is_dir():
            files = {str(one.relative_to(found)): one for one in sorted(found.rglob("*")) if one.is_file()}
            files = {name: one for name, one in files.items() if found / name != path}
        else:
            into = target.endswith(("/", ".")) or len(sources) > 1
            files = {found.name if into else "": found}
        for name, file in files.items():
            place = posixpath.normpath(posixpath.join(target_path, name))
            built.files[_in_workspace(path, place, built)] = file


def _in_workspace(path: Path, place: str, built: Built) -> str:
    """Return where a file of an absolute path is in the workspace."""
    if built.folder and place.startswith(built.folder.rstrip("/") + "/"):
        return place[len(built.folder.rstrip("/")) + 1 :]
    top, _, rest = place.lstrip("/").partition("/")
    if top in _SYSTEM or not rest:
        raise DataError(f"{path} copies a file to {place}, which is of the system in a sandbox without images")
    built.links[f"/{top}"] = f"{ROOT}/{top}"
    return f"{ROOT}/{top}/{rest}"
