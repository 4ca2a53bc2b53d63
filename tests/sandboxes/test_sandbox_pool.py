"""A pool gives a used sandbox again only when nothing is left of its use, asks again for refused ones, and ends all."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest

from asyncrl.config.sandbox_settings import SandboxSettings
from asyncrl.ports import free_port
from asyncrl.sandboxes.pool import SandboxPool
from asyncrl.sandboxes.sandbox import ExecResult, SandboxError
from asyncrl.sandboxes.served import ServedSandbox
from harness.sandboxes import output_of, prepared, running, script, settings_of
from harness.stage import until

WORD = f"7000{os.getpid()}"
LEAVE = """
setsid sh -c 'echo > up; exec sleep {word}' >/dev/null 2>&1 &
while [ ! -s up ]; do sleep 0.01; done
mkdir -p folder/below; echo secret > folder/below/file; ln -s /etc link; mkfifo pipe; chmod 0 folder/below folder .
"""
LEAVE_IN_MEMORY = "echo secret > /tmp/file; echo secret > /dev/shm/file; chmod 0 /tmp"
SHARED = "import ctypes; print(ctypes.CDLL(None).shmget(1, 4096, 0o1666))"


@pytest.fixture
async def opened(request) -> AsyncIterator[SandboxPool]:
    pool = SandboxPool(settings_of(request.param[0], **request.param[1]))
    yield pool
    await pool.close()


@pytest.mark.parametrize("opened", [(kind, {"uses": 2}) for kind in ("bubblewrap", "none")], indirect=True)
async def test_a_further_use_finds_no_file_and_no_process_of_the_use_before(opened):
    private = opened._settings.kind == "bubblewrap"
    async with opened.open() as first:
        await script(first, (LEAVE_IN_MEMORY if private else "") + LEAVE.format(word=WORD))
        assert running(WORD)
    assert not running(WORD)

    async with opened.open() as second:
        _, found = await script(second, "find . /tmp /dev/shm -mindepth 1" if private else "find . -mindepth 1")
        _, mode = await script(second, "stat -c %a .")
        await second.put("file", b"text")
    async with opened.open() as third:
        pass

    assert (found, mode, second is first, third is first) == ("", "755\n", True, False)


@pytest.mark.parametrize("opened", [("bubblewrap", {"uses": 9})], indirect=True)
async def test_a_sandbox_with_shared_memory_of_its_use_is_replaced(opened):
    async with opened.open() as first:
        _, made = await output_of(first, ["python3", "-c", SHARED])
    async with opened.open() as second:
        pass

    assert int(made) >= 0
    assert second is not first


@pytest.mark.parametrize("opened", [("none", {"uses": 9, "ttl_s": ttl_s}) for ttl_s in (9.0, 1e-6)], indirect=True)
async def test_an_emptied_sandbox_that_died_or_is_too_old_is_replaced_and_all_end_with_the_pool(opened):
    async with opened.open() as first:
        pass
    async with opened.open() as second:
        assert (second is first) is (opened._settings.ttl_s > 1)
    if second.process is not None:
        os.kill(second.process, signal.SIGKILL)
    await until(lambda: not second.works, "its death is seen")

    async with opened.open() as third:
        assert await script(third, "echo works") == (ExecResult(0), "works\n")

    assert third is not second
    await opened.close()
    assert third.process is None


async def test_a_refused_sandbox_is_asked_for_again_until_its_server_is_there_and_the_reason_is_kept_meanwhile():
    async with prepared("http") as settings:
        pass  # it is away
    vitals: dict[str, float] = {}
    pool = SandboxPool(settings, vitals)

    async def use() -> str:
        async with pool.open() as sandbox:
            return (await script(sandbox, "echo works"))[1]

    using = asyncio.create_task(use())
    await until(lambda: vitals.get("sandbox_refusals", 0) >= 2, "it is asked for again")
    assert "opens no sandbox" in pool.fault
    assert time.time() - vitals["sandbox_refused_at_s"] < 60
    async with prepared("http", port=int(settings.url.rpartition(":")[2])):
        assert await using == "works\n"
        await pool.close()

    assert (pool.fault, vitals["sandboxes"], vitals["sandboxes_left"]) == ("", 0, 0)
    assert vitals["sandbox_starts"] == vitals["sandbox_ends"] == 1
    assert "sandbox_refused_at_s" not in vitals


async def test_a_sandbox_that_is_refused_for_too_long_is_a_fault_with_the_last_reason():
    url = f"http://127.0.0.1:{free_port()}"
    pool = SandboxPool(SandboxSettings(kind="http", url=url, start_limit_s=0.1))

    with pytest.raises(SandboxError, match=rf"none started within sandbox.start_limit_s = 0.1; .*{url} opens no"):
        async with pool.open():
            pass


@pytest.mark.parametrize("opened", [("bubblewrap", {"starts": 1})], indirect=True)
async def test_a_start_whose_trajectory_is_gone_leaves_no_sandbox(opened):
    users = [asyncio.create_task(opened.open().__aenter__()) for _ in range(3)]
    await until(lambda: bool(opened._starts.locked()), "one starts")
    for user in users:
        user.cancel()
    await asyncio.wait(users)
    await until(lambda: not opened._tasks, "all have ended")

    assert not opened._lives
    assert not opened._left


@pytest.mark.parametrize("opened", [("none", {})], indirect=True)
async def test_a_sandbox_that_does_not_end_is_told_again_and_counted_until_it_has(opened, monkeypatch):
    ends, told = ServedSandbox.destroy, 0

    async def destroy(sandbox: ServedSandbox) -> None:
        nonlocal told
        told += 1
        if told < 3:
            raise SandboxError("its service does not answer")
        await ends(sandbox)

    monkeypatch.setattr(ServedSandbox, "destroy", destroy)
    async with opened.open() as sandbox:
        pass  # the trajectory is well
    left = opened._vitals["sandboxes_left"]
    await until(lambda: not opened._vitals["sandboxes_left"], "it has ended")

    assert (left, told, sandbox.process) == (1, 3, None)
