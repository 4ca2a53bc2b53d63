"""Sandboxes of tests."""

from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from asyncrl.config.sandbox_settings import SandboxSettings, sandbox_kind
from asyncrl.sandboxes.sandbox import ExecResult, Sandbox


def settings_of(kind: str, **options: Any) -> SandboxSettings:
    """Settings of a kind; skips the test where the kind cannot run, and tells why."""
    settings = SandboxSettings(kind=kind, trusted=True, **options)
    if problem := sandbox_kind(kind).problem(settings):
        pytest.skip(problem)
    return settings


async def output_of(sandbox: Sandbox, command: Sequence[str], **options: Any) -> tuple[ExecResult, str]:
    """Run a program; returns its end, and both streams of its output."""
    pieces: list[bytes] = []
    result = await sandbox.exec(command, on_output=lambda _stream, piece: pieces.append(piece), **options)
    return result, b"".join(pieces).decode()


async def script(sandbox: Sandbox, text: str, **options: Any) -> tuple[ExecResult, str]:
    """Run lines of a shell."""
    return await output_of(sandbox, ["sh", "-c", text], **options)


def running(word: str) -> list[int]:
    """Return the processes of this machine, those in sandboxes too, with a word in their command lines."""
    return [one.pid for one in psutil.process_iter(["cmdline"]) if word in (one.info["cmdline"] or ())]
