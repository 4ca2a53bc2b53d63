"""The folder of fetched versions, which engines of one host share: what they remove at the same time, and leave."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from actors.engine import fetch
from actors.engine.fetch import Fetcher
from actors.runtime.actor import Context
from asyncrl.bus.connection import Bus
from asyncrl.locks import try_lock
from harness.stage import Stage
from harness.versions import Versions


@pytest.fixture
def context(bus: Bus, stage: Callable[..., Stage]) -> Context:
    return stage(engine={"kind": "scripted"}, weights={"store": "stream"}).context("engine", bus)


@pytest.mark.parametrize("made_anew", [False, True])
async def test_a_version_that_another_engine_has_just_removed_is_removed_once_and_not_when_it_was_made_anew(
    bus: Bus, context: Context, made_anew: bool, monkeypatch: pytest.MonkeyPatch
):
    learner, one, other = Versions(bus, context), Fetcher(bus, context.files), Fetcher(bus, context.files)
    first, second = await learner.publish(full=True), await learner.publish(full=True)
    old, _ = [await fetcher.directory(first) for fetcher in (one, other)]
    new, _ = [await fetcher.directory(second) for fetcher in (one, other)]
    looked = []

    def stand_still(handle: int) -> bool:
        """Between its look at the folder and its lock this process stands still, and the other one does not."""
        if not looked:
            looked.append(handle)
            other.release(keep=new)
            if made_anew:
                old.mkdir()
        return try_lock(handle)

    monkeypatch.setattr(fetch, "try_lock", stand_still)
    one.release(keep=new)

    assert looked
    assert (old.exists(), new.exists()) == (made_anew, True)
    one.close()
    other.close()


KILLED = """
import os, sys
from pathlib import Path
from asyncrl.weights import directories
directories.crash_point = lambda _: os.kill(os.getpid(), 9)
directories.remove_directory(Path(sys.argv[1]))
"""


async def test_what_an_engine_was_removing_when_it_was_killed_goes_before_the_next_version_is_made(
    bus: Bus, context: Context
):
    learner, fetcher = Versions(bus, context), Fetcher(bus, context.files)
    first, second = await learner.publish(full=True), await learner.publish(full=True)
    old = await fetcher.directory(first)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(old)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [name for name in os.listdir(old.parent) if name.endswith(".old")]

    new = await fetcher.directory(second)

    assert sorted(os.listdir(new.parent)) == [".fetch", new.name]
    fetcher.close()
