"""A pool starts sandboxes ahead, and gives a used one again only when nothing is left of its use."""

import os
from collections.abc import AsyncIterator

import pytest

from asyncrl.sandboxes.pool import SandboxPool
from asyncrl.sandboxes.sandbox import ExecResult
from harness.sandboxes import output_of, running, script, settings_of
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


@pytest.mark.parametrize("opened", [(kind, {"ready": 2}) for kind in ("bubblewrap", "none")], indirect=True)
async def test_sandboxes_are_started_ahead_and_one_that_died_is_replaced(opened):
    async with opened.open() as first:
        await until(lambda: len(opened._ready) == 2, "two sandboxes wait")
        died, waits = opened._ready[-1], opened._ready[0]
        died._process.kill()
        await until(lambda: not died.works, "the death of one is seen")

        async with opened.open() as second:
            assert await script(second, "echo works") == (ExecResult(0), "works\n")

    assert second is waits is not first
    await opened.close()
    assert not opened._uses
    assert died.process is None
