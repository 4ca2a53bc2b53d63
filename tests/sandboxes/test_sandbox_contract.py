"""The contract of all kinds of sandboxes."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from asyncrl.config.sandbox_settings import SANDBOXES, SandboxKind, SandboxSettings, sandbox_kind
from asyncrl.sandboxes.kinds import open_sandbox
from asyncrl.sandboxes.remote import sandbox_of
from asyncrl.sandboxes.sandbox import ExecResult, FileRefused, Sandbox, SandboxError
from asyncrl.sandboxes.served import ServedSandbox
from harness.sandboxes import output_of, prepared, running, script
from harness.stage import until

WORD = f"9000{os.getpid()}"  # in command lines of programs of these tests


@pytest.fixture(params=SANDBOXES)
async def settings(request: pytest.FixtureRequest) -> AsyncIterator[SandboxSettings]:
    async with prepared(request.param, output_mb=1) as found:
        yield found


@pytest.fixture
async def sandbox(settings: SandboxSettings) -> AsyncIterator[Sandbox]:
    async with open_sandbox(settings) as opened:
        yield opened


@pytest.mark.parametrize("name", SANDBOXES)
def test_every_kind_describes_itself(name: str):
    kind, settings = sandbox_kind(name), SandboxSettings(kind=name, trusted=True, image="image", url="http://host")

    assert isinstance(kind, SandboxKind)
    assert not [*kind.checks(settings)]
    assert isinstance(kind.capabilities(), frozenset)


async def test_a_program_reads_its_input_and_environment_and_its_streams_are_kept_apart(sandbox):
    found: list[tuple[str, bytes]] = []

    result = await sandbox.exec(
        ["sh", "-c", 'cat; echo "$NAME" >&2; exit 3'],
        on_output=lambda stream, piece: found.append((stream, piece)),
        stdin=b"text\n",
        environment={"NAME": "a b"},
    )

    assert result == ExecResult(3)
    assert sorted(found) == [("stderr", b"a b\n"), ("stdout", b"text\n")]


async def test_output_comes_while_the_program_runs(sandbox):
    came = asyncio.Event()
    program = asyncio.ensure_future(
        sandbox.exec(
            ["sh", "-c", "echo first; while [ ! -e end ]; do sleep 0.01; done"], on_output=lambda *_: came.set()
        )
    )

    await asyncio.wait_for(came.wait(), 30)
    assert not program.done()
    await sandbox.put("end", b"")
    assert await program == ExecResult(0)


async def test_an_environment_has_nothing_of_the_worker(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET", "1")

    _, text = await output_of(sandbox, ["env"])

    assert {line.partition("=")[0] for line in text.splitlines()} <= {"PATH", "HOME", "PWD"}


async def test_unknown_programs_and_signals_have_the_exit_codes_of_a_shell(sandbox):
    missing, text = await output_of(sandbox, ["no-such-program"])
    await sandbox.put("text", b"")
    refused, _ = await output_of(sandbox, ["./text"])
    killed, _ = await script(sandbox, "kill -9 $$")

    assert (missing.code, refused.code, killed.code) == (127, 126, -9)
    assert "no-such-program" in text


async def test_a_program_that_runs_too_long_is_killed_with_its_children(sandbox):
    result, _ = await script(sandbox, f"sleep {WORD}1 & sleep {WORD}1", wall_s=0.2)

    assert result == ExecResult(-9, "wall_s")
    await until(lambda: not running(f"{WORD}1"), "its children end")


async def test_a_program_that_prints_too_much_is_killed_and_the_first_bytes_are_kept(sandbox):
    result, text = await output_of(sandbox, ["yes"])

    assert result.limit == "output_mb"
    assert len(text) == 1_000_000


async def test_files_are_written_and_read_with_their_folders(sandbox):
    await sandbox.put("a/b/program", b"#!/bin/sh\necho here\n", executable=True)
    large = os.urandom(3_000_000)
    await sandbox.put("large", b"first")
    await sandbox.put("large", large)

    assert await output_of(sandbox, ["a/b/program"]) == (ExecResult(0), "here\n")
    assert await sandbox.get("large", most_bytes=3_000_000) == large
    with pytest.raises(FileRefused, match="at most 10 bytes"):
        await sandbox.get("large", most_bytes=10)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", ".", "a//b"])
async def test_paths_stay_in_the_workspace(sandbox, path):
    with pytest.raises(FileRefused, match="leaves the workspace"):
        await sandbox.get(path, most_bytes=10)
    with pytest.raises(FileRefused, match="leaves the workspace"):
        await sandbox.put(path, b"")


async def test_links_pipes_folders_and_absent_files_are_refused(sandbox):
    await script(sandbox, "ln -s /etc/passwd link; ln -s / root; mkfifo pipe; mkdir folder")

    for path in ("link", "root/etc/passwd", "pipe", "folder", "absent"):
        with pytest.raises(FileRefused):
            await sandbox.get(path, most_bytes=1_000_000)
    with pytest.raises(FileRefused):
        await sandbox.put("root/tmp/file", b"")
    await sandbox.put("link", b"own")
    assert await sandbox.get("link", most_bytes=10) == b"own"


async def test_programs_run_side_by_side(sandbox):
    results = await asyncio.gather(*(script(sandbox, f"sleep 0.1; echo {number}") for number in range(5)))

    assert [text for _, text in results] == [f"{number}\n" for number in range(5)]


async def test_a_program_reaches_a_server_of_the_worker(sandbox):
    listening = await sandbox.listen()
    asked: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set_result(await reader.readline())
        writer.write(b"answer\n")
        writer.close()

    server = await asyncio.start_server(answer, sock=listening)
    host, port = listening.getsockname()
    program = f"exec 3<>/dev/tcp/{host}/{port}; echo question >&3; cat <&3"
    found = await output_of(sandbox, ["bash", "-c", program])
    server.close()

    assert host == "127.0.0.1"
    assert found == (ExecResult(0), "answer\n")
    assert await asked == b"question\n"


async def test_a_cancelled_program_ends(sandbox):
    came = asyncio.Event()
    program = asyncio.ensure_future(sandbox.exec(["sh", "-c", f"echo; sleep {WORD}2"], on_output=lambda *_: came.set()))
    await asyncio.wait_for(came.wait(), 30)

    program.cancel()

    await until(lambda: not running(f"{WORD}2"), "the program ends")


async def test_nothing_runs_after_the_end_of_a_sandbox(settings):
    sandbox = sandbox_of(settings)
    await sandbox.start()
    await script(sandbox, f"setsid sleep {WORD}3 >/dev/null 2>&1 &")
    program = asyncio.ensure_future(sandbox.exec(["sleep", f"{WORD}3"], on_output=lambda *_: None))
    await asyncio.sleep(0)

    await sandbox.destroy()
    await sandbox.destroy()

    with pytest.raises(SandboxError, match="destroyed"):
        await program
    with pytest.raises(SandboxError, match="destroyed"):
        await script(sandbox, "true")
    assert not running(f"{WORD}3")


async def test_a_sandbox_whose_process_is_killed_fails_and_is_no_fault_of_the_program(settings):
    sandbox = sandbox_of(settings)
    if not isinstance(sandbox, ServedSandbox):
        pytest.skip("its process is elsewhere")
    await sandbox.start()
    program = asyncio.ensure_future(sandbox.exec(["sleep", "100"], on_output=lambda *_: None))
    await asyncio.sleep(0)

    sandbox._process.kill()

    with pytest.raises(SandboxError, match="failed"):
        await program
    await sandbox.destroy()


async def test_a_sandbox_leaves_no_open_files(settings):
    async def one() -> None:
        async with open_sandbox(settings) as sandbox:
            await script(sandbox, "echo")
            await sandbox.put("a", b"")
            await sandbox.get("a", most_bytes=1)
            (await sandbox.listen()).close()

    await one()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await one()
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before, "files are closed, also those of a server")


def test_only_trusted_programs_run_without_a_sandbox():
    [finding] = sandbox_kind("none").checks(SandboxSettings(kind="none"))

    assert "sandbox.trusted = true" in finding.message
