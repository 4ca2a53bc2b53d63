"""Restarts of a run's only gateway: its clients do not notice them."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.state.records import counted
from harness.gateways import turns_of
from harness.live_runs import new_key, with_gateway
from harness.runs import PACED, Run, address_of, command, up
from harness.sdks import sdks
from harness.stage import until

pytestmark = pytest.mark.slow

MOST = 24  # tokens of a reply


def gateways(run: Run) -> set[int]:
    """Return the living processes that play the gateway."""
    found = set()
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            words = line.read_bytes().split(b"\0")
            if b"gateway-1" in words and str(run.root).encode() in b" ".join(words):
                found.add(int(line.parent.name))
    return found


async def ask(address: str, key: str, answered: list[str], stop: asyncio.Event, *, streams: bool) -> None:
    """Ask over two APIs, with the default retries of their SDKs."""
    messages = [{"role": "user", "content": "abc"}]
    async with sdks(address, key) as (first, second):
        chat = first.with_options(max_retries=2).chat.completions
        while not stop.is_set():
            if streams:
                stream = await chat.create(model="any", messages=messages, max_tokens=MOST, stream=True)
                answered.append([event async for event in stream][-1].choices[0].finish_reason)
            again = second.with_options(max_retries=2).messages
            answered.append((await again.create(model="any", messages=messages, max_tokens=MOST)).stop_reason)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_gateway_that_is_asked_to_leave_or_is_killed_refuses_no_connection(tmp_path: Path, number: int):
    settings, address = with_gateway(tmp_path)
    async with up(tmp_path, *settings, PACED, "learner.steps=100000") as run:
        key = await new_key(tmp_path, address)
        answered, stop, streams = list[str](), asyncio.Event(), number == signal.SIGTERM
        asking = [asyncio.create_task(ask(address, key, answered, stop, streams=streams)) for _ in range(3)]
        try:
            for _ in range(2):
                (old,) = gateways(run)
                os.kill(old, number)
                await until(lambda old=old: len(now := gateways(run)) == 1 and old not in now, "the next one is alone")
                had = len(answered)
                await until(lambda had=had: len(answered) > had + 3 or any(one.done() for one in asking), "it answers")
        finally:
            stop.set()
        await asyncio.gather(*asking)
        assert all(answered)
        if streams:
            bus = await Bus.connect(address_of(run), run.root.name)
            begun, ended = await turns_of(bus)
            assert begun.keys() == ended.keys() and {end.finish for end in ended.values()} <= {"stop", "length"}
            await bus.close()
            _, listed = await command(tmp_path, "keys", "list")
            assert f"anna  {counted(len(begun), 'reply')}, " in listed
            code, shown = await command(tmp_path, "dump", "--live", "--tenant", "anna")
            turns = [json.loads(line) for line in Path(tmp_path, shown.strip()).read_text().splitlines()]
            assert (code, {turn["turn"] for turn in turns}) == (0, begun.keys())
