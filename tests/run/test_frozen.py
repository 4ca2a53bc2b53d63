"""Frozen processes count as dead after their lease, whoever they are, and do no harm."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from harness.runs import PACED, Run, command, two_steps_more, up

SLOW = pytest.mark.slow


def process_of(run: Run, name: str) -> int | None:
    """Process id of an actor, of the NATS server, or of the embedded engine's server."""
    if name == "server":
        return run.server()
    if name == "engine's server":
        return next((pid for pid, line in run.processes().items() if "asyncrl.engine.embedded" in line), None)
    return run.actor(name)


async def frozen_one(run: Run, name: str) -> int:
    """Freeze a process as soon as it is there; on a busy machine it may just be replaced, for it was silent before."""
    found: list[int] = []

    def freeze() -> bool:
        if (pid := process_of(run, name)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                found.append(pid)
        return bool(found)

    await run.reaches(freeze, f"{name} is there to be frozen")
    return found[0]


@SLOW
async def test_whoever_freezes_is_replaced_and_nothing_is_lost(tmp_path: Path):
    frozen = [["rollout-1", "reward-1", "recorder-1"], ["prompter-1", "buffer-1"], ["learner-1", "engine-1"]]
    frozen += [["engine's server"], ["supervisor-1"], ["server"]]
    settings = [
        PACED,
        "learner.steps=100000",
        "learner.checkpoint_every=10",
        "workers.lease_s=1.0",
        "supervision.silence_s=2.0",
    ]
    settings += ["eval.prompts=4", "eval.every=50"]
    async with up(tmp_path, *settings) as run:
        await two_steps_more(run, "two steps")
        for names in frozen:
            for name, before in [(name, await frozen_one(run, name)) for name in names]:
                await run.reaches(
                    lambda name=name, before=before: process_of(run, name) not in (None, before),
                    f"{name} is replaced",
                )
            await two_steps_more(run, f"two steps after {', '.join(names)} froze")
        run.interrupt()
        assert await run.ended() == 0, run.story

    assert "the NATS server does not answer; killed" in run.out
    assert "the supervisor is silent; killed" in run.out
    code, output = await command(tmp_path, "audit", "short", "--deep")
    assert code == 0, output
    assert "run short: clean" in output.splitlines()
