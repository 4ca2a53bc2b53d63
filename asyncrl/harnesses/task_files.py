"""The files and tests of a row, and the reward that the tests give."""

from __future__ import annotations

import asyncio
import base64
import difflib
import math
import posixpath
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import NamedTuple, TypeAlias

import msgspec

from asyncrl.environments.protocol import DataError
from asyncrl.errors import UNREADABLE
from asyncrl.harnesses.harness import run_in
from asyncrl.sandboxes.sandbox import FileRefused, Sandbox, SandboxError
from asyncrl.shortened import shortened
from topics.prompts import PromptRow

_MOST_FILES = 1_000
_MOST_BYTES = 1 << 20  # of a file that is graded
_DIFF_CHARACTERS = 16_384  # each has at most 4 bytes, and an artefact 65,536

_REWARD_BYTES = 1 << 16
_TICK_S = 0.02  # Linux dates the change of a file up to a tick of its clock too early
_CHANGED = """
import os, stat, sys
for folder, _, names in os.walk("."):
    for path in (os.path.join(folder, name) for name in names):
        about = os.lstat(path)
        if stat.S_ISREG(about.st_mode) and about.st_ctime_ns > int(sys.argv[1]):
            print(path)
"""

OpenSandbox: TypeAlias = Callable[..., AbstractAsyncContextManager[Sandbox]]


class Binary(msgspec.Struct):
    """The content of a file that is no text."""

    base64: str


class TaskFiles(msgspec.Struct):
    """The files and tests that the metadata of a row name."""

    files: dict[str, str | Binary] = {}  # of the workspace: contents by their paths
    tests: dict[str, list[str]] = {}  # programs by the names of tests; exit code 0 passes
    test_files: dict[str, str | Binary] = {}  # that are put over the files before the tests
    test_limit_s: float | None = None  # seconds of each test; None: `sandbox.wall_s`
    test_environment: dict[str, str] = {}  # variables of the tests
    # Files in which the tests leave the reward: a number, or JSON with "reward". Without such a file the reward is 0.
    reward_files: list[str] = []
    setup: list[str] = []  # a program that runs before the policy works; its failure is a fault of the environment
    setup_limit_s: float = 120.0
    limit_s: float | None = None  # seconds of an attempt, if fewer than those of the harness
    links: dict[str, str] = {}  # folders of the workspace by absolute paths at which programs find them too
    image: str = ""  # of the sandboxes, in the place of `sandbox.image`

    @classmethod
    def of(cls, row: PromptRow) -> TaskFiles:
        """
        Raises:
            DataError: the metadata have another form.
        """
        try:
            return msgspec.convert(row.metadata, cls)
        except msgspec.ValidationError as error:
            words = "metadata of a row of a harness has files, tests (lists of words) and test_files, by their names"
            raise DataError(f"{words}: {error}") from error


class Collected(NamedTuple):
    """The files of a workspace after an attempt."""

    files: dict[str, bytes]
    left_out: list[str]  # paths of those that are too large, or too many


class Graded(NamedTuple):
    """The result of the tests of an attempt."""

    reward: float  # as the tests wrote it, or the share of tests that passed; 0 if test files were changed
    metrics: dict[str, float]
    report: str  # the output of the tests that failed


async def put_files(sandbox: Sandbox, files: Mapping[str, bytes]) -> None:
    """Write files into a workspace; those that begin with `#!` are programs."""
    for path, data in files.items():
        await sandbox.put(path, data, executable=data.startswith(b"#!"))


async def prepare(sandbox: Sandbox, task: TaskFiles) -> int:
    """Make the folders that links name, write the files of a row, and run its setup.

    Returns:
        Nanoseconds since the epoch, after which no file of an image has changed; -1 without an image.

    Raises:
        SandboxError: the setup failed, or took too long.
    """
    since = -1
    if task.image:
        since = time.time_ns()
        await asyncio.sleep(_TICK_S)
    if folders := [folder for folder in task.links.values() if folder != "."]:
        result, output = await run_in(sandbox, ["mkdir", "-p", *folders, *map(posixpath.dirname, task.reward_files)])
        if result.code:
            raise SandboxError(f"the folders of the row cannot be made: {output[-300:]}")
    await put_files(sandbox, {path: bytes_of(content) for path, content in task.files.items()})
    if task.setup:
        result, output = await run_in(sandbox, task.setup, wall_s=task.setup_limit_s)
        if result.code:
            ended = f"was stopped by {result.limit}" if result.limit else f"ended with exit code {result.code}"
            raise SandboxError(f"the setup of the row, {shlex.join(task.setup)}, {ended}: {output.strip()[-500:]}")
    return since


async def collect(sandbox: Sandbox, since: int = -1) -> Collected:
    """Return the regular files of a workspace, which the sandbox reads without following links.

    Args:
        since: as `prepare` returned it.

    Raises:
        SandboxError: it cannot be read.
    """
    lists = ["python3", "-I", "-S", "-c", _CHANGED, str(since)] if since >= 0 else ["find", ".", "-type", "f", "-print"]
    result, listed = await run_in(sandbox, lists)
    if result.code:
        raise SandboxError(f"the files of the workspace cannot be listed: {listed[:200]}")
    paths = [line.removeprefix("./") for line in listed.splitlines()]
    found = {}
    for path in paths[:_MOST_FILES]:
        with suppress(FileRefused):  # it is too large, a program changed it meanwhile, or its name is no text
            found[path] = await sandbox.get(path, most_bytes=_MOST_BYTES)
    return Collected(found, [path for path in paths if path not in found])


async def grade(open_sandbox: OpenSandbox, task: TaskFiles, collected: Collected) -> Graded:
    """Run the tests of a row on the files of an attempt, in a fresh sandbox."""
    files, over = collected.files, {path: bytes_of(content) for path, content in task.test_files.items()}
    changed = [path for path, data in over.items() if files.get(path, data) != data]
    results = {posixpath.dirname(path) for path in task.reward_files}
    kept = {path: data for path, data in files.items() if posixpath.dirname(path) not in results}
    failed: dict[str, str] = {}
    async with open_sandbox() as sandbox:
        await prepare(sandbox, task)
        await put_files(sandbox, {**kept, **over})
        for name, command in task.tests.items():
            result, output = await run_in(sandbox, command, wall_s=task.test_limit_s, environment=task.test_environment)
            if result.code:
                stopped = f", stopped by {result.limit}" if result.limit else ""
                failed[name] = f"{name}: exit code {result.code}{stopped}\n{output}"
        passed = len(task.tests) - len(failed)
        reward = await _written(sandbox, task.reward_files) if task.reward_files else passed / len(task.tests)
    metrics = {"tests_passed": float(passed), "tests_changed": float(bool(changed))}
    report = [*failed.values(), *([_left_out(collected.left_out)] if collected.left_out else [])]
    metrics |= {"files_left_out": float(len(collected.left_out))} if collected.left_out else {}
    return Graded(0.0 if changed else reward, metrics, shortened("\n".join(report)))


def _left_out(paths: list[str]) -> str:
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    limits = f"a file has at most {_MOST_BYTES:,} bytes, and there are at most {_MOST_FILES:,}"
    return f"not given to the tests: {', '.join(paths[:5])}{more}; {limits}"


async def _written(sandbox: Sandbox, paths: Sequence[str]) -> float:
    """Return the reward that tests left in one of these files; 0 without one that can be read."""
    for path in paths:
        try:
            found = msgspec.json.decode((await sandbox.get(path, most_bytes=_REWARD_BYTES)).strip())
        except (FileRefused, *UNREADABLE):
            continue
        value = found.get("reward") if isinstance(found, dict) else found
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return 0.0


def bytes_of(content: str | Binary) -> bytes:
    """Return the bytes of a file."""
    return content.encode() if isinstance(content, str) else base64.b64decode(content.base64)


def difference(before: Mapping[str, str | Binary], after: Mapping[str, bytes]) -> str:
    """Return the changes of the files as a unified diff."""
    pieces: list[str] = []
    for path in sorted({*before, *after}):
        old = bytes_of(before.get(path, "")).decode(errors="replace")
        new = after.get(path, b"").decode(errors="replace")
        names = (f"a/{path}" if path in before else "/dev/null", f"b/{path}" if path in after else "/dev/null")
        pieces += difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), *names)
    return shortened("".join(pieces), _DIFF_CHARACTERS)
