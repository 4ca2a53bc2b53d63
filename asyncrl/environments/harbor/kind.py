"""Environments of kind `harbor`: folders of tasks in the format of Harbor, for harnesses.

A task is a folder with `instruction.md`, `task.toml`, `environment/` (a Dockerfile and its files) and `tests/test.sh`,
which writes a reward to `/logs/verifier/reward.txt` or `reward.json`.
"""

from __future__ import annotations

import base64
import re
import tomllib
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from asyncrl.environments.harbor.dockerfile import Built, read_dockerfile
from asyncrl.environments.protocol import DataError, Environment, EnvironmentKind, Problem
from asyncrl.epochs import row_at
from topics.prompts import PromptRow

HIDDEN = ".harbor"
"""Folder of the workspace with the tests and logs of a task."""

_MOST_BYTES = 4 << 20  # of the files of a task: they travel with its row
_SLICE = re.compile(r"(?P<path>.*)@\[(?P<first>-?\d*):(?P<end>-?\d*)\]")
Content: TypeAlias = str | dict[str, str]
"""Text, or a table with `base64`."""

_TEST = "tests/test.sh"


class HarborOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of `harbor`."""

    # Whether the programs of the machine take the place of images: instructions such as RUN have no effect.
    host: bool = False
    # Whether sandboxes are containers of the image that `task.toml` names; needs `sandbox.kind` podman or docker.
    images: bool = False
    setup: list[str] = []  # a program that runs in the sandbox before the policy works
    setup_limit_s: float = 120.0
    tasks: list[str] = []  # names of folders; empty: all


class _Verifier(msgspec.Struct, frozen=True):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}


class _Agent(msgspec.Struct, frozen=True):
    timeout_sec: float = 0.0


class _Image(msgspec.Struct, frozen=True):
    docker_image: str = ""


class _TaskToml(msgspec.Struct):
    metadata: dict[str, Any] = {}
    verifier: _Verifier = _Verifier()
    agent: _Agent = _Agent()
    environment: _Image = _Image()


class Harbor:
    """Tasks of a folder: every epoch has each task once. See `asyncrl.environments.protocol.Environment`."""

    def __init__(self, problem: Problem, options: HarborOptions, base: Path) -> None:
        """
        Args:
            problem: its name is a task, or a folder of tasks with an optional slice as `@[0:100]`.
        """
        match = _SLICE.fullmatch(problem.name)
        folder = base / (match["path"] if match else problem.name)
        alone = (folder / "task.toml").is_file()
        found = [folder] if alone else sorted(path.parent for path in folder.glob("*/task.toml"))
        if match:
            found = found[slice(*(int(match[name]) if match[name] else None for name in ("first", "end")))]
        names = {path.name for path in found}
        if missing := [name for name in options.tasks if name not in names]:
            raise DataError(f"harbor:{problem.name} has no task {missing[0]}; it has {', '.join(sorted(names)[:20])}")
        self._tasks = [path for path in found if not options.tasks or path.name in options.tasks]
        if not self._tasks:
            raise DataError(f"harbor:{problem.name}: {folder} has no folder with a task.toml")
        self._problem, self._options = problem, options
        self.rows_per_epoch: int | None = len(self._tasks)
        self._rows = [_row(task, problem, options) for task in self._tasks]

    def row(self, index: int) -> PromptRow:
        """The row at place `index`: its metadata have the files and tests of the task."""
        return self._rows[row_at(index, len(self._rows), self._problem.seed)]

    def describe(self) -> str:
        """The folder and its number of tasks."""
        return f"harbor {self._problem.name}: {len(self._rows)} tasks"

    def score(self, completion: str, row: PromptRow) -> float:
        """Tests give the reward, not this."""
        raise NotImplementedError("an environment of kind harbor scores no answers: its tests give the rewards")


def _row(task: Path, problem: Problem, options: HarborOptions) -> PromptRow:
    about = _read_toml(task / "task.toml")
    image = about.environment.docker_image if options.images else ""
    built = _environment(task, about, options)
    tests = {f"{HIDDEN}/tests/{name}": data for name, data in _files(task / "tests", task).items()}
    if f"{HIDDEN}/{_TEST}" not in tests:
        raise DataError(f"the Harbor task {task} has no {_TEST}")
    files = {name: _content(path) for name, path in built.files.items()}
    size = len(msgspec.msgpack.encode([files, tests]))
    if size > _MOST_BYTES:
        raise DataError(f"the files of the Harbor task {task} have {size:,} bytes, expected at most {_MOST_BYTES:,}")
    links = {"/tests": f"{HIDDEN}/tests", "/logs": f"{HIDDEN}/logs", **built.links}
    links |= {built.folder: "."} if built.folder.strip("/") else {}
    metadata: dict[str, Any] = {
        "environment": msgspec.to_builtins(problem),
        "task": task.name,
        "files": files,
        "test_files": tests,
        "tests": {"test.sh": ["bash", f"{HIDDEN}/{_TEST}"]},
        "links": links,
        "reward_files": [f"{HIDDEN}/logs/verifier/reward.{kind}" for kind in ("txt", "json")],
        "test_limit_s": about.verifier.timeout_sec,
        "test_environment": about.verifier.env,
        "setup": options.setup,
        "setup_limit_s": options.setup_limit_s,
    }
    if image:
        metadata["image"] = image
    if about.agent.timeout_sec:
        metadata["limit_s"] = about.agent.timeout_sec
    if "difficulty" in about.metadata:
        metadata["difficulty"] = about.metadata["difficulty"]
    try:
        instruction = (task / "instruction.md").read_text()
    except OSError as error:
        raise DataError(f"the Harbor task {task} has no instruction.md that can be read: {error}") from error
    return PromptRow([{"role": "user", "content": instruction}], metadata=metadata)


def _read_toml(path: Path) -> _TaskToml:
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), _TaskToml)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise DataError(f"{path} is no task of Harbor: {error}") from error


def _environment(task: Path, about: _TaskToml, options: HarborOptions) -> Built:
    """Return the working folder of a task, and the files of its image unless sandboxes have the image.

    Raises:
        DataError: the task needs more of its image than files.
    """
    path = task / "environment" / "Dockerfile"
    has_image = options.images and bool(about.environment.docker_image)
    built = read_dockerfile(path, copies=not has_image) if path.is_file() else Built("/app", {}, {}, [])
    needs = f"the image {about.environment.docker_image}" if about.environment.docker_image else ""
    needs = needs or next((f"the commands of its Dockerfile: {line}" for line in built.skipped), "")
    if needs and not (options.host or has_image):
        advice = "set the option host = true to take the programs of this machine in its place"
        named = "images = true for sandboxes of the image that its task.toml names"
        raise DataError(f"the Harbor task {task} needs {needs}. Its image is not used; {advice}, or {named}")
    return built


def _files(folder: Path, task: Path) -> dict[str, Content]:
    """Return the files of a folder by their paths in it."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    if (size := sum(path.stat().st_size for path in paths)) > _MOST_BYTES:
        raise DataError(f"{folder} of the Harbor task {task.name} has {size:,} bytes, expected at most {_MOST_BYTES:,}")
    return {str(path.relative_to(folder)): _content(path) for path in paths}


def _content(path: Path) -> Content:
    data = path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


class _Kind(EnvironmentKind):
    """See `asyncrl.environments.protocol.EnvironmentKind`."""

    def make(self, name: str, parameters: dict[str, Any], seed: int, base: Path) -> Environment:
        try:
            options = msgspec.convert(parameters, HarborOptions)
        except msgspec.ValidationError as error:
            known = ", ".join(HarborOptions.__struct_fields__)
            raise DataError(f"harbor:{name}: {error}; its options are {known}") from error
        return Harbor(Problem("harbor", name, seed, parameters), options, base)


KIND = _Kind()
