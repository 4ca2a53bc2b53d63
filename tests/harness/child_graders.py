"""Rewards in child processes, for tests: graders of a source, and what became of their calls and processes."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.child_pool.frames import CallFailed
from asyncrl.rewards.graders import Grader, open_grader
from asyncrl.rewards.score import GradeRequest


def asked(completion: str = "x", label: Any = None, **more: Any) -> GradeRequest:
    return GradeRequest(completion=completion, prompt="p", label=label, **more)


@asynccontextmanager
async def grading(folder: Path, source: str, *, spec: str = "r.py:reward", **options: Any) -> AsyncIterator[Grader]:
    (folder / "r.py").write_text(textwrap.dedent(source))
    grader = await open_grader(spec, base=folder, **options)
    try:
        yield grader
    finally:
        await grader.close()


async def failing(grader: Grader, request: GradeRequest) -> CallFailed:
    with pytest.raises(CallFailed) as error:
        await grader.grade(request)
    return error.value


async def outcomes(grader: Grader, completions: list[str]) -> list[Any]:
    """Reward, or the reason of the failure, of each completion, all in flight at once."""
    done = await asyncio.gather(*(grader.grade(asked(text)) for text in completions), return_exceptions=True)
    return [result.reason if isinstance(result, CallFailed) else result.reward for result in done]


def is_alive(pid: float) -> bool:
    """Return whether the process runs; one that has ended may still wait for its parent to notice."""
    try:
        stat = Path(f"/proc/{int(pid)}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def ends(pid: int) -> bool:
    """Wait for the end of a process that is nobody's child here."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(process):
        return bool(select.select([process], [], [], 120)[0])


PARENT = """
import asyncio, os, signal
from pathlib import Path
from asyncrl.rewards.graders import GradeRequest, open_grader

async def main():
    grader = await open_grader("r.py:reward", base=Path.cwd())
    result = await grader.grade(GradeRequest("hello", "p"))
    print(int(result.reward), flush=True)
    if {dies}:
        os.kill(os.getpid(), signal.SIGKILL)
    await grader.close()

asyncio.run(main())
"""


def run_parent(folder: Path, source: str, *, dies: bool) -> subprocess.CompletedProcess[str]:
    (folder / "r.py").write_text(textwrap.dedent(source))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PARENT.format(dies=dies)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
