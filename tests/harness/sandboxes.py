"""Sandboxes of tests."""

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
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
async def prepared(kind: str, *, port: int = 0, **options: Any) -> AsyncIterator[SandboxSettings]:
    """Settings of a kind, as `settings_of`; for `http` with a server of the sandboxes of this machine.

    Args:
        port: of the server; 0: a free one.
    """
    if kind != "http":
        yield settings_of(kind, **options)
        return
    server = SandboxServer(settings_of("bubblewrap", **options), key="", most=8)
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    port = port or free_port()
    try:
        await web.TCPSite(runner, LOOPBACK, port).start()
        yield SandboxSettings(kind=kind, url=f"http://{LOOPBACK}:{port}", **options)
    finally:
        await runner.cleanup()


@cache
def skeleton(program: str) -> str:
    """Make an image without files, for which this machine's `/usr` is readable; returns its name."""
    return import_image(program, "skeleton", {})


def import_image(program: str, name: str, files: Mapping[str, bytes]) -> str:
    """Make an image of folders, links and some files, unless there is an equal one; returns its name."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as made:
        for folder in ("usr", "proc", "dev", "sys", "tmp", "run", "etc", "workspace"):
            _add(made, folder, type=tarfile.DIRTYPE, mode=0o1777 if folder == "tmp" else 0o755)
        for path in sorted(Path("/").iterdir()):
            if path.is_symlink() and os.readlink(path).startswith("usr/"):
                _add(made, path.name, type=tarfile.SYMTYPE, linkname=os.readlink(path))
        for path, content in files.items():
            _add(made, path, content, mode=0o600)
    image = f"asyncrl-tests:{name}-{hashlib.sha256(data.getvalue()).hexdigest()[:12]}"
    found = [program, "image", "inspect", image]
    if shutil.which(program) and subprocess.run(found, check=False, capture_output=True).returncode:
        subprocess.run([program, "import", "-", image], input=data.getvalue(), check=False, capture_output=True)
    return image


def _add(archive: tarfile.TarFile, name: str, content: bytes = b"", **about: Any) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    for key, value in about.items():
        setattr(entry, key, value)
    archive.addfile(entry, io.BytesIO(content))


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
