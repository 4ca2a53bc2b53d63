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
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "skeleton.tar")
        with tarfile.open(archive, "w") as made:
            skeleton_files(made)
        subprocess.run([program, "import", str(archive), image], check=False, capture_output=True)
    return image


def skeleton_files(archive: tarfile.TarFile) -> None:
    """Write the folders and links of an image without files."""
    for name in ("usr", "proc", "dev", "sys", "tmp", "run", "etc", "workspace"):
        folder = tarfile.TarInfo(name)
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
        archive.addfile(folder)
    for path in Path("/").iterdir():
        if path.is_symlink() and os.readlink(path).startswith("usr/"):
            link = tarfile.TarInfo(path.name)
            link.type, link.linkname = tarfile.SYMTYPE, os.readlink(path)
            archive.addfile(link)


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
