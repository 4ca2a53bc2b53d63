"""A whole run whose only engine is full of rollouts: requests of the gateway take their rows, and nothing is lost."""

import re
from pathlib import Path

import pytest
from aiohttp import ClientSession

from asyncrl.bus.connection import Bus
from harness.audited import messages_on
from harness.live_runs import new_key, with_gateway
from harness.runs import UNTRAINED, address_of, command, two_steps_more, up
from harness.sdks import sdks
from topics.engines import ENGINE_READY
from topics.topic import ENGINES

pytestmark = pytest.mark.slow

FULL = ["engine.max_running=2", "rollout.max_new_tokens=120"]
TOKENS = 4


async def retracted(bus: Bus) -> int:
    """Requests that gave their row up, as the engine counts them."""
    address = (await messages_on(bus, ENGINES)).on(ENGINE_READY)[-1].address
    async with ClientSession() as http, http.get(f"{address}/metrics") as response:
        found = re.search(r"num_retracted_requests_total\{[^}]*\} (\d+)", await response.text())
    assert found is not None
    return int(found[1])


async def test_rollouts_give_their_rows_to_requests_of_the_gateway_and_go_on_with_their_tokens(tmp_path: Path):
    settings, address = with_gateway(tmp_path)
    async with up(tmp_path, *settings, *FULL, *UNTRAINED, "learner.steps=100000", "nats.keep=run") as run:
        key = await new_key(tmp_path, address)
        bus = await Bus.connect(address_of(run), "short")
        await run.reaches(run.steps, "rollouts have the engine's rows")
        async with sdks(address, key) as (client, _):
            while not await retracted(bus):  # where rollouts are short, both rows may be free for a moment
                messages = [{"role": "user", "content": "abc"}]
                reply = await client.chat.completions.create(model="any", messages=messages, max_tokens=TOKENS)
                assert reply.choices[0].finish_reason in ("stop", "length")
        await two_steps_more(run, "what gave way is resumed and trained")
        await bus.close()
        code, _ = await command(tmp_path, "down")
        assert (code, await run.ended()) == (0, 0), run.story
    code, output = await command(tmp_path, "audit", "--deep")
    assert code == 0, output
