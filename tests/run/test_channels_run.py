"""A whole run whose gateway answers from the channel `live` while training moves on."""

from pathlib import Path

import pytest

from asyncrl.bus.connection import Bus
from harness.gateways import finished_turn
from harness.live_runs import moved, new_key, newest, with_gateway
from harness.runs import PACED, address_of, command, up
from harness.sdks import openai, sdks
from harness.stage import until

pytestmark = pytest.mark.slow

GROUPS = ["engine.groups.train.kind=embedded", "engine.groups.served.kind=embedded", "gateway.engines=served"]
PATIENCE = ["engine.start_deadline_s=300"]
ENDLESS = [PACED, "learner.steps=100000", "learner.keep_versions=300"]


class Client:
    """Asks a gateway, and says which versions sampled a reply."""

    def __init__(self, bus: Bus, address: str, key: str) -> None:
        self._bus, self._address, self._key = bus, address, key

    async def versions(self, **headers: str) -> set[int]:
        """Ask once; returns the versions of the reply's tokens."""
        async with sdks(self._address, self._key) as (client, _):
            reply = await client.chat.completions.with_raw_response.create(
                model="any",
                messages=[{"role": "user", "content": "abc"}],
                max_tokens=8,
                extra_headers=headers,
            )
        return {*(await finished_turn(self._bus, reply.headers["x-asyncrl-turn"])).versions.tolist()}


async def test_the_gateway_answers_from_the_channel_while_training_moves_on_and_goes_back_in_one_command(
    tmp_path: Path,
):
    settings, address = with_gateway(tmp_path)
    async with up(tmp_path, *settings, *GROUPS, *PATIENCE, *ENDLESS) as run:
        key = await new_key(tmp_path, address)
        bus = await Bus.connect(address_of(run), "short")
        client = Client(bus, address, key)
        first = await client.versions()
        await run.reaches(lambda: len(run.steps()) >= 4, "training moves on")
        assert await client.versions() == first
        assert len(first) == 1

        promoted = await moved(tmp_path, "promote", str(await newest(tmp_path)))
        await until(lambda: is_answered_by(client, {promoted}), "the engine has what was promoted")
        await run.kill("engine-served-1")
        await run.kill("supervisor-1")
        await until(lambda: is_answered_by(client, {promoted}), "its successor has it, too", 180)

        assert {await moved(tmp_path, "rollback")} == first
        await until(lambda: is_answered_by(client, first), "the engine has gone back")
        await bus.close()
        code, _ = await command(tmp_path, "down")
        assert (code, await run.ended()) == (0, 0), run.story
    code, output = await command(tmp_path, "audit", "--deep")
    assert code == 0, output


async def is_answered_by(client: Client, versions: set[int]) -> bool:
    try:
        return await client.versions() == versions
    except openai.APIError:  # everything dies with the supervisor, and is started again
        return False
