"""Sandboxes of another machine over HTTP: they end with their worker, and the server limits what workers ask for."""

import asyncio
import os
import signal
import sys

import psutil
import pytest

from asyncrl.config.sandbox_settings import SandboxSettings, sandbox_kind
from asyncrl.ports import free_port
from asyncrl.sandboxes import http
from asyncrl.sandboxes.http import API_KEY, HttpSandbox
from asyncrl.sandboxes.sandbox import SandboxError
from harness.sandbox_kills import pool_in
from harness.sandboxes import prepared, running, script, settings_of
from harness.stage import until

WORD = f"9100{os.getpid()}"
WORKER = """
import asyncio, sys
from asyncrl.config.sandbox_settings import SandboxSettings
from asyncrl.sandboxes.http import HttpSandbox

async def main() -> None:
    sandbox = HttpSandbox(SandboxSettings(kind="http", url=sys.argv[1]))
    await sandbox.start()
    await sandbox.exec(["sleep", sys.argv[2]], on_output=lambda *_: None)

asyncio.run(main())
"""


async def test_nothing_is_left_of_a_killed_worker():
    async with prepared("http") as settings:
        worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, settings.url, WORD)
        try:
            await until(lambda: bool(sleeping()), "its program runs")
        finally:
            worker.send_signal(signal.SIGKILL)
            await worker.wait()

        await until(lambda: not sleeping(), "its program ends", 5.0)


def sleeping() -> list[int]:
    """Return the processes of the program, without the worker that names it."""
    return [pid for pid in running(WORD) if b"sleep\0" in open(f"/proc/{pid}/cmdline", "rb").read()[:6]]


async def test_a_server_that_ends_is_a_fault_of_the_sandbox():
    async with prepared("http") as settings:
        sandbox = HttpSandbox(settings)
        await sandbox.start()
        program = asyncio.ensure_future(script(sandbox, "sleep 100"))
        await asyncio.sleep(0)
    with pytest.raises(SandboxError):
        await program
    with pytest.raises(SandboxError, match="its server closed"):
        await script(sandbox, "true")
    await sandbox.destroy()


async def test_a_sandbox_that_is_killed_in_a_program_is_a_fault_and_the_server_continues():
    async with prepared("http") as settings:
        sandbox, other = HttpSandbox(settings), HttpSandbox(settings)
        before = {child.pid for child in psutil.Process().children()}
        await sandbox.start()
        [first] = [child for child in psutil.Process().children() if child.pid not in before]
        program = asyncio.ensure_future(script(sandbox, f"sleep {WORD}"))
        await until(lambda: bool(sleeping()), "its program runs")
        first.kill()

        with pytest.raises(SandboxError, match="the sandbox failed"):
            await asyncio.wait_for(program, 60)
        await other.start()
        assert (await script(other, "echo works"))[1] == "works\n"
        await sandbox.destroy()
        await other.destroy()


async def test_a_server_that_is_frozen_is_a_fault_of_the_sandbox(monkeypatch, tmp_path):
    monkeypatch.setattr(http, "HEARTBEAT_S", 0.5)
    async with pool_in(tmp_path) as pool:
        await until(lambda: pool.server() is not None, "the server")
        sandbox = await new_sandbox_at(pool.url)
        program = asyncio.ensure_future(script(sandbox, f"sleep {WORD}"))
        await until(lambda: bool(sleeping()), "its program runs")
        pool.server().suspend()

        with pytest.raises(SandboxError, match="its server closed the connection"):
            await asyncio.wait_for(program, 60)
        await sandbox.destroy()


async def new_sandbox_at(url: str) -> HttpSandbox:
    """Start a sandbox, once its server is there."""
    async with asyncio.timeout(60):
        while True:
            sandbox = HttpSandbox(SandboxSettings(kind="http", url=url))
            try:
                await sandbox.start()
                return sandbox
            except SandboxError:
                await asyncio.sleep(0.1)


async def test_workers_cannot_raise_the_limits_of_the_server():
    async with prepared("http", wall_s=1.0) as settings:
        asks = SandboxSettings(kind="http", url=settings.url, wall_s=100.0)
        sandbox = HttpSandbox(asks)
        await sandbox.start()
        await sandbox.put("a", b"1")
        assert await sandbox.get("a", most_bytes=10) == b"1"
        await sandbox.destroy()


def test_the_command_serves_sandboxes_with_a_key_and_a_wrong_key_is_named(monkeypatch, tmp_path):
    settings_of("bubblewrap")
    port = free_port()
    (tmp_path / "served.toml").write_text('[sandbox]\nkind = "bubblewrap"\n')
    monkeypatch.setenv(API_KEY, "right")

    async def checked() -> tuple[str, str]:
        command = [sys.executable, "-m", "asyncrl.cli.main", "sandboxes", "served.toml", "--port", str(port)]
        server = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE)
        try:
            await asyncio.wait_for(server.stdout.readline(), 60)
            kind, settings = sandbox_kind("http"), SandboxSettings(kind="http", url=f"http://127.0.0.1:{port}")
            right = await asyncio.to_thread(kind.problem, settings)
            monkeypatch.setenv(API_KEY, "wrong")
            return right, await asyncio.to_thread(kind.problem, settings)
        finally:
            server.kill()
            await server.wait()

    right, wrong = asyncio.run(checked())

    assert right == ""
    assert "opens no sandbox: 401" in wrong


def test_a_server_that_is_not_there_is_named():
    address = f"http://127.0.0.1:{free_port()}"

    assert f"{address} opens no sandbox: " in sandbox_kind("http").problem(SandboxSettings(kind="http", url=address))
