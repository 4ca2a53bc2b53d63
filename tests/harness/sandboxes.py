"""Sandboxes of tests."""

import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from asyncrl.config.sandbox_settings import SandboxSettings, sandbox_kind
from asyncrl.ports import LOOPBACK, free_port
from asyncrl.sandboxes.http_server import SandboxServer
from asyncrl.sandboxes.sandbox import ExecResult, Sandbox

CONTAINERS = ("docker", "podman")


def settings_of(kind: str, **options: Any) -> SandboxSettings:
    """Settings of a kind; skips the test where the kind cannot run, and tells why."""
    if kind in CONTAINERS and not options.get("image"):
        options = {"image": skeleton(kind), "readable": ["/usr", *options.pop("readable", [])], **options}
    settings = SandboxSettings(kind=kind, trusted=True, **options)
    if problem := sandbox_kind(kind).problem(settings):
        pytest.skip(problem)
    return settings


@asynccontextmanager
async def prepared(kind: str, **options: Any) -> AsyncIterator[SandboxSettings]:
    """Settings of a kind, as `settings_of`; for `http` with a server of the sandboxes of this machine."""
    if kind != "http":
        yield settings_of(kind, **options)
        return
    server = SandboxServer(settings_of("bubblewrap", **options), key="", most=8)
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    port = free_port()
    try:
        await web.TCPSite(runner, LOOPBACK, port).start()
        yield SandboxSettings(kind=kind, url=f"http://{LOOPBACK}:{port}", **options)
    finally:
        await runner.cleanup()


@cache
def skeleton(program: str) -> str:
    """Make an image without files, for which this machine's `/usr` is readable; returns its name."""
    image = "asyncrl-tests:skeleton"
    if shutil.which(program) is None:
        return image
    links = [path for path in Path("/").iterdir() if path.is_symlink() and os.readlink(path).startswith("usr/")]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("usr", "proc", "dev", "sys", "tmp", "run", "etc", "workspace"):
            Path(folder, name).mkdir()
        Path(folder, "tmp").chmod(0o1777)
        for link in links:
            Path(folder, link.name).symlink_to(os.readlink(link))
        archive = Path(folder, "skeleton.tar")
        with tarfile.open(archive, "w") as made:
            for path in sorted(Path(folder).iterdir()):
                if path != archive:
                    made.add(path, path.name)
        subprocess.run([program, "import", str(archive), image], check=False, capture_output=True)
    return image


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
