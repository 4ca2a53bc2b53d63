"""The files and tests of a row, and the reward that the tests give."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from typing import NamedTuple, TypeAlias

import msgspec

from asyncrl.environments.protocol import DataError
from asyncrl.harnesses.harness import run_in
from asyncrl.sandboxes.sandbox import FileRefused, Sandbox, SandboxError
from asyncrl.shortened import shortened
from topics.prompts import PromptRow

_MOST_FILES = 1_000
_MOST_BYTES = 1 << 20  # of a file that is graded
_DIFF_CHARACTERS = 16_384  # each has at most 4 bytes, and an artefact 65,536

OpenSandbox: TypeAlias = Callable[[], AbstractAsyncContextManager[Sandbox]]


class TaskFiles(msgspec.Struct):
    """The files and tests that the metadata of a row name."""

    files: dict[str, str] = {}  # of the workspace: texts by their paths
    tests: dict[str, list[str]] = {}  # programs by the names of tests; exit code 0 passes
    test_files: dict[str, str] = {}  # that are put over the files before the tests

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


class Graded(NamedTuple):
    """The result of the tests of an attempt."""

    reward: float  # the share of tests that passed, 0 if test files were changed
    metrics: dict[str, float]
    report: str  # the output of the tests that failed


async def collect(sandbox: Sandbox) -> dict[str, bytes]:
    """Return the regular files of a workspace, which the sandbox reads without following links.

    Raises:
        SandboxError: it cannot be read.
    """
    result, listed = await run_in(sandbox, ["find", ".", "-type", "f", "-size", "-2048", "-print"])
    if result.code:
        raise SandboxError(f"the files of the workspace cannot be listed: {listed[:200]}")
    paths = [line.removeprefix("./") for line in listed.splitlines()][:_MOST_FILES]
    found = {}
    for path in paths:
        with suppress(FileRefused):  # a program changed it meanwhile, or its name is no text
            found[path] = await sandbox.get(path, most_bytes=_MOST_BYTES)
    return found


async def grade(open_sandbox: OpenSandbox, task: TaskFiles, files: Mapping[str, bytes]) -> Graded:
    """Run the tests of a row on the files of an attempt, in a fresh sandbox."""
    changed = [path for path, text in task.test_files.items() if files.get(path, text.encode()) != text.encode()]
    failed: dict[str, str] = {}
    async with open_sandbox() as sandbox:
        for path, data in {**files, **{path: text.encode() for path, text in task.test_files.items()}}.items():
            await sandbox.put(path, data)
        for name, command in task.tests.items():
            result, output = await run_in(sandbox, command)
            if result.code:
                failed[name] = f"{name}: exit code {result.code}\n{output}"
    passed = len(task.tests) - len(failed)
    reward = 0.0 if changed else passed / len(task.tests)
    metrics = {"tests_passed": float(passed), "tests_changed": float(bool(changed))}
    return Graded(reward, metrics, shortened("\n".join(failed.values())))


def difference(before: Mapping[str, str], after: Mapping[str, bytes]) -> str:
    """Return the changes of the files as a unified diff."""
    pieces: list[str] = []
    for path in sorted({*before, *after}):
        old, new = before.get(path, ""), after.get(path, b"").decode(errors="replace")
        names = (f"a/{path}" if path in before else "/dev/null", f"b/{path}" if path in after else "/dev/null")
        pieces += difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), *names)
    return shortened("".join(pieces), _DIFF_CHARACTERS)
