"""Escapes and abuses that a sandbox with bubblewrap withstands."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from asyncrl.config.sandbox_settings import SandboxCapability
from asyncrl.sandboxes import control_groups
from asyncrl.sandboxes.control_groups import group_parents
from asyncrl.sandboxes.kinds import end_leftovers, open_sandbox
from asyncrl.sandboxes.sandbox import ExecResult, FileRefused, Sandbox
from harness.sandboxes import output_of, running, script, settings_of
from harness.stage import until

SECRET = "key-of-somebody-else"
LIMITS = {"memory_mb": 200, "disk_mb": 20, "processes": 40, "output_mb": 1, "wall_s": 60.0}
CALL = "import ctypes; c = ctypes.CDLL(None, use_errno=True); r = c.syscall({}); print(r, ctypes.get_errno())"
EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
NUMBERS = {"x86_64": 0, "aarch64": 1}
REFUSED_COMMANDS = (
    "unshare -U true",
    "unshare -r true",
    "unshare -m true",
    "bwrap --ro-bind / / true",
    "mount -t tmpfs none /tmp",
    "umount /proc/1",
    "mount -o remount,rw /",
    "mknod disk b 8 0",
    "chroot / true",
    "nsenter -t 2 -m true",
    "echo 1 > /proc/sys/kernel/core_pattern",
    "echo b > /proc/sysrq-trigger",
    "taskset -cp 0-99 $$",
    "nice -n -20 true 2>&1 | grep -v cannot",
    "cat /proc/1/environ",
    "cat /proc/1/mem",
    "kill -9 1 && sleep 0.1 && ! ls -d /proc/1",
    "dmesg",
    "hostname other",
)
REFUSED_CALLS = (  # numbers on x86_64 and aarch64, arguments, error
    ((425, 425), "8, ctypes.create_string_buffer(120)", ENOSYS),  # io_uring_setup
    ((250, 219), "0, -3, 1", EPERM),  # keyctl
    ((321, 280), "0, 0, 0", EPERM),  # bpf
    ((298, 241), "0, 0, -1, -1, 0", EPERM),  # perf_event_open
    ((101, 117), "0, 0, 0, 0", EPERM),  # ptrace
    ((310, 270), "1, 0, 0, 0, 0, 0", EPERM),  # process_vm_readv
    ((323, 282), "0", EPERM),  # userfaultfd
    ((302, 261), "1, 7, ctypes.create_string_buffer(16), 0", EPERM),  # prlimit64 of the first process
    ((41, 198), "40, 1, 0", EAFNOSUPPORT),  # socket(AF_VSOCK), which reaches the host of a virtual machine
    ((41, 198), "38, 5, 0", EAFNOSUPPORT),  # socket(AF_ALG)
    ((16, 29), "0, 0x5412, ctypes.create_string_buffer(b'x')", EPERM),  # ioctl(TIOCSTI)
)


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with open_sandbox(settings_of("bubblewrap", **LIMITS)) as opened:
        yield opened


@pytest.fixture(params=("control groups", "limits of each process"))
async def limited(request, monkeypatch, tmp_path: Path) -> AsyncIterator[Sandbox]:
    """A sandbox on a machine with control groups, and one on a machine without."""
    if request.param == "control groups" and not group_parents():
        pytest.skip("this user can make no control groups")
    if request.param != "control groups":
        monkeypatch.setattr(control_groups, "_ROOT", tmp_path)
        group_parents.cache_clear()
    try:
        async with open_sandbox(settings_of("bubblewrap", **LIMITS)) as opened:
            yield opened
    finally:
        group_parents.cache_clear()


async def python(sandbox: Sandbox, text: str, *arguments: str) -> str:
    """Run lines of Python; returns the output."""
    return (await output_of(sandbox, ["python3", "-c", textwrap.dedent(text), *arguments]))[1].strip()


async def works(sandbox: Sandbox) -> bool:
    """Return whether the sandbox still runs programs."""
    return await script(sandbox, "echo works") == (ExecResult(0), "works\n")


async def test_files_of_the_host_are_not_there(sandbox, tmp_path: Path):
    keys = tmp_path / "nats.creds"
    keys.write_text(SECRET)

    for path in (keys, Path("/etc/shadow"), Path(__file__), Path.home(), Path("/var"), Path("/sys")):
        result, text = await output_of(sandbox, ["ls", "-d", str(path)])
        assert result.code != 0, text


async def test_files_that_the_settings_name_are_read_and_not_written():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        Path(folder, "data").write_text("data")
        async with open_sandbox(settings_of("bubblewrap", readable=[folder])) as sandbox:
            assert await script(sandbox, f"cat {folder}/data") == (ExecResult(0), "data")
            assert (await script(sandbox, f"touch {folder}/new"))[0].code != 0


async def test_the_environment_and_command_line_of_no_process_of_the_host_are_seen(sandbox, monkeypatch):
    monkeypatch.setenv("NATS_PASSWORD", SECRET)
    other = subprocess.Popen(["sleep", "60", SECRET], stderr=subprocess.DEVNULL)
    try:
        _, text = await script(sandbox, "cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; ls /proc")
    finally:
        other.kill()
        other.wait()

    assert SECRET.encode() not in text.encode()
    assert len(re.findall(r"^\d+$", text, re.MULTILINE)) < 10


async def test_no_server_of_the_host_or_of_a_network_is_reached(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("\0asyncrl-test-" + str(os.getpid()))
        unix.listen()
        found = await python(
            sandbox,
            """
            import socket, sys
            for host, port in (("127.0.0.1", sys.argv[1]), ("169.254.169.254", 80), ("10.0.0.1", 53), ("1.1.1.1", 443)):
                try:
                    socket.create_connection((host, int(port)), timeout=5)
                    print("reached", host)
                except OSError as error:
                    print(type(error).__name__)
            try:
                socket.socket(socket.AF_UNIX).connect("\\0" + sys.argv[2])
                print("reached")
            except OSError as error:
                print(type(error).__name__)
            """,
            str(server.getsockname()[1]),
            f"asyncrl-test-{os.getpid()}",
        )

    assert found.split() == ["ConnectionRefusedError", "OSError", "OSError", "OSError", "ConnectionRefusedError"]


async def test_the_key_and_the_server_of_another_trajectory_are_not_reached(sandbox):
    reads = f"grep -rs {SECRET} /workspace /tmp /dev/shm /run /proc/[0-9]*/environ"
    async with open_sandbox(settings_of("bubblewrap", **LIMITS)) as other:
        await other.put("key", SECRET.encode())
        with await other.listen() as listening:
            connect = f"exec 3<>/dev/tcp/127.0.0.1/{listening.getsockname()[1]}"
            own = [await script(other, reads), await output_of(other, ["bash", "-c", connect])]
            found = [await script(sandbox, reads), await output_of(sandbox, ["bash", "-c", connect])]

    assert [result.code for result, _ in own] == [0, 0]
    assert [result.code for result, _ in found] == [1, 1]
    assert "Connection refused" in found[1][1]


async def test_a_fork_bomb_ends_at_the_limit_of_processes(limited):
    before = len(psutil.pids())
    running = asyncio.ensure_future(script(limited, "f() { f | f & }; f; sleep 100", wall_s=3))
    await asyncio.sleep(2)

    assert len(psutil.pids()) < before + 200
    assert (await running)[0].limit == "wall_s"
    async with asyncio.timeout(30):
        while not await works(limited):
            await script(limited, "kill -9 -1")


async def test_processes_that_leave_no_room_for_others_are_a_limit_and_no_fault_of_the_sandbox(limited):
    fills = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            while True:
                try:
                    if os.fork() == 0:
                        time.sleep(1000)
                except OSError:
                    pass
        """
    await python(limited, fills)

    async def refused() -> bool:
        result, _ = await output_of(limited, ["true"])
        assert result in (ExecResult(0), ExecResult(126, "processes"))
        return result.code != 0

    await until(refused, "no process is left")


async def test_a_process_gets_no_more_memory_than_the_limit(limited):
    assert "MemoryError" in await python(limited, "x = bytearray(400_000_000)")
    assert await works(limited)


async def test_all_processes_together_get_no_more_memory_than_the_limit(sandbox):
    if SandboxCapability.SHARED_MEMORY_LIMIT not in sandbox.capabilities:
        pytest.skip("this user can make no control groups: the limit is one of each process")
    holds = "x = bytearray(b'1') * 120_000_000; print('held', flush=True); import time; time.sleep(3)"

    found = await asyncio.gather(*(python(sandbox, holds) for _ in range(5)))
    shared = await python(
        sandbox, "import mmap; m = mmap.mmap(-1, 400_000_000); m.write(b'1' * 300_000_000); print('held')"
    )

    assert found.count("held") < 5
    assert "held" not in shared
    assert await works(sandbox)


async def test_files_take_no_more_than_the_limit(sandbox):
    text = "for d in /workspace /tmp /dev/shm; do for i in 1 2 3 4 5 6; do head -c 15M /dev/zero > $d/$i; done; done"
    await script(sandbox, f"{text} 2>/dev/null")

    _, sizes = await script(sandbox, "du -sm /workspace /tmp /dev/shm | cut -f 1")

    assert [int(size) for size in sizes.split()][:2] == pytest.approx([20, 20], abs=2)
    assert int(sizes.split()[2]) <= 65
    with pytest.raises(FileRefused, match="No space left"):
        await sandbox.put("more", b"1" * 1_000_000)


async def test_no_other_folder_can_be_written(sandbox):
    folders = "$(cut -d ' ' -f 2 /proc/mounts) /etc /run /home /usr/bin /dev/pts"
    _, written = await script(sandbox, f"for d in {folders}; do touch $d/new 2>/dev/null && echo $d; done")

    assert set(written.split()) == {"/workspace", "/tmp", "/dev/shm"}


async def test_sparse_files_are_refused(sandbox):
    made, _ = await script(sandbox, "truncate -s 1T giant")
    await script(sandbox, "truncate -s 19M large")

    assert made.code != 0
    with pytest.raises(FileRefused, match="19,922,944 bytes"):
        await sandbox.get("large", most_bytes=1_000_000)


async def test_a_setuid_program_gives_no_rights(sandbox):
    _, text = await script(
        sandbox,
        "cp /usr/bin/id . && chmod 6755 id && ./id -u && su -c 'id -u' </dev/null; grep NoNew /proc/self/status",
    )

    assert text.split()[0] == "1000"
    assert text.split()[-2:] == ["NoNewPrivs:", "1"]
    assert "0" not in text.split()


@pytest.mark.parametrize("command", REFUSED_COMMANDS)
async def test_a_command_is_refused(sandbox, command):
    result, text = await script(sandbox, command)

    assert result.code != 0, text
    assert await works(sandbox)


@pytest.mark.parametrize(("numbers", "arguments", "error"), REFUSED_CALLS)
async def test_the_kernel_refuses_a_call(sandbox, numbers, arguments, error):
    number = numbers[NUMBERS[os.uname().machine]]

    assert await python(sandbox, CALL.format(f"{number}, {arguments}")) == f"-1 {error}"


async def test_a_container_refuses_the_same_commands_and_calls():
    column = NUMBERS[os.uname().machine]
    async with open_sandbox(settings_of("podman", **LIMITS)) as sandbox:
        for command in REFUSED_COMMANDS:
            result, text = await script(sandbox, command)
            assert result.code != 0, (command, text)
        for numbers, arguments, error in REFUSED_CALLS:
            found = await python(sandbox, CALL.format(f"{numbers[column]}, {arguments}"))
            assert found == f"-1 {error}", (numbers, found)
        clone = await python(sandbox, CALL.format(f"{(56, 220)[column]}, 0x10000011, 0, 0, 0, 0"))
        assert clone == f"-1 {EPERM}"
        assert await works(sandbox)


async def test_the_second_numbering_of_calls_is_refused(sandbox):
    if os.uname().machine != "x86_64":
        pytest.skip("only x86_64 has one")

    assert await python(sandbox, CALL.format(0x40000000 + 39)) == f"-1 {ENOSYS}"


async def test_a_program_that_kills_all_processes_does_not_end_the_sandbox(sandbox):
    result, _ = await script(sandbox, "kill -9 -1; sleep 1")

    assert result.code in (0, -9, 137)
    assert await works(sandbox)


async def test_a_ruined_workspace_is_no_fault_of_the_sandbox(sandbox):
    await sandbox.put("file", b"")
    await script(sandbox, "rm -rf /workspace; chmod 000 /workspace")

    with pytest.raises(FileRefused):
        await sandbox.get("file", most_bytes=1)
    assert await works(sandbox)


async def test_a_gigabyte_of_output_is_cut_and_takes_no_memory(sandbox):
    before = psutil.Process().memory_info().rss

    result, text = await script(sandbox, "head -c 1000000000 /dev/zero | tr '\\0' x & yes >&2; wait")

    assert result.limit == "output_mb"
    assert len(text) == 1_000_000
    assert psutil.Process().memory_info().rss - before < 100_000_000


async def test_a_program_that_ignores_signals_and_leaves_its_group_ends_with_the_sandbox():
    async with open_sandbox(settings_of("bubblewrap", **LIMITS)) as sandbox:
        await script(sandbox, "trap '' TERM HUP INT; setsid sh -c 'sleep 98765' >/dev/null 2>&1 & sleep 0.1")
        assert running("98765")

    assert not running("98765")


def left_of(process: int) -> list[Path]:
    places = [Path(tempfile.gettempdir()), *group_parents().values()]
    return [path for place in places for path in place.glob(f"asyncrl-sandbox-*-{process}-*")]


WORKER = """
import asyncio
from asyncrl.config.sandbox_settings import SandboxSettings
from asyncrl.sandboxes.kinds import open_sandbox

async def main():
    async with open_sandbox(SandboxSettings(kind={kind!r}, trusted=True)) as sandbox:
        await sandbox.exec(["sh", "-c", "setsid sleep {word} & sleep {word}"], on_output=print)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ("bubblewrap", "none"))
async def test_after_the_kill_of_a_worker_nothing_is_left(kind):
    settings_of(kind)
    word = f"4000{os.getpid()}"
    worker = subprocess.Popen([sys.executable, "-c", WORKER.format(kind=kind, word=word)])
    try:
        await until(lambda: len(running(word)) >= 2, "the programs run")
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()

    await until(lambda: not running(word), "no program is left")
    await end_leftovers()
    await until(lambda: not left_of(worker.pid), "no file and no group is left")


async def test_a_sandbox_whose_first_process_was_killed_too_is_ended_by_the_next_worker():
    settings_of("none")
    word = f"5000{os.getpid()}"
    worker = subprocess.Popen([sys.executable, "-c", WORKER.format(kind="none", word=word)])
    await until(lambda: len(running(word)) >= 2, "the programs run")
    first = [one for one in psutil.Process(worker.pid).children() if "server.py" in " ".join(one.cmdline())]

    for process in (*first, psutil.Process(worker.pid)):
        process.kill()
    worker.wait()
    await end_leftovers()
    try:
        await until(lambda: not left_of(worker.pid), "no file and no group is left")
        assert not (group_parents() and running(word))
    finally:
        for process in running(word):
            os.kill(process, signal.SIGKILL)
