"""Shadow answers: sampled behind a reply by another version, sealed with its turn, seen and awaited by nobody."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import WRITER, publish, read
from asyncrl.ports import free_port
from harness.gateways import Served, stored_turns
from harness.live_runs import conversing_model
from harness.sdks import sdks
from harness.sglang_like import Asked, like_sglang
from harness.stage import Stage, until
from topics.engines import EngineReady
from topics.promotions import WeightsCanaried
from topics.turns import TURN_SHADOWED, TurnFinished, TurnShadowed, TurnStarted
from topics.wire import SEALED

USER = [{"role": "user", "content": "abc"}]
ASK: dict[str, Any] = {"model": "any", "messages": USER, "max_tokens": 3}
KEYS = {"served": "0:1:d1", "canary": "0:2:d2"}


async def test_the_client_has_its_reply_and_the_shadow_is_stored_behind_it_under_the_key_of_the_turn(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    goes_on = asyncio.Event()
    external = {"kind": "external", "addresses": ["http://127.0.0.1:1"]}
    settings = {"count": 1, "port": free_port(), "engines": "served", "canary_engines": "canary"}
    made = stage(
        model={"path": str(conversing_model(tmp_path / "model", tools=False))},
        engine={"groups": dict.fromkeys(("train", *KEYS), external)},
        gateway=settings,
    )
    async with like_sglang() as live, like_sglang() as canary:

        async def waits(asked: Asked) -> dict[str, Any]:
            await goes_on.wait()
            return canary.answer(asked, asked.tokens()[::-1])

        canary.serve = waits
        canaried = WeightsCanaried(0, 2, "d2", KEYS["served"], "command", 1, 1.0, shadow=True)
        trial = await publish(bus, canaried, headers={WRITER: "supervisor"})
        served = Served(bus, made)
        await served.start()
        for name, engine in (("served", live), ("canary", canary)):
            engine.weight_version = KEYS[name]
            lineage, version, digest = KEYS[name].split(":")
            await publish(bus, EngineReady(f"engine-{name}-1", engine.address, int(lineage), int(version), digest, 8))
        async with sdks(served.address, served.key) as (client, _):
            raw = await client.chat.completions.with_raw_response.create(**ASK)
            for headers in ({"x-asyncrl-private": "1"}, {"x-asyncrl-turn-type": "side"}):
                await client.chat.completions.create(**ASK, extra_headers=headers)
            await client.chat.completions.create(**ASK, temperature=0)
            await until(lambda: len(canary.asked) == 1, "the canary is asked behind the reply")
        assert (await read_last(bus, TURN_SHADOWED)) is None
        goes_on.set()
        await until(lambda: served.count("shadows") == 1, "the shadow answer is stored")
        await served.stop()
    assert len(canary.asked) == 1 and len(live.asked) == 4, "one shadow, and none of it where users are answered"
    assert canary.asked[0].ids == live.asked[0].ids
    facts = await stored_turns(bus)
    turn = raw.headers["x-asyncrl-turn"]
    [started] = [fact for fact in facts if isinstance(fact, TurnStarted) and fact.turn_id == turn]
    [finished] = [fact for fact in facts if isinstance(fact, TurnFinished) and fact.turn_id == turn]
    assert finished.versions.tolist() == [1, 1, 1] and finished.trial == 0
    record = await read_last(bus, TURN_SHADOWED, turn)
    assert record is not None and record.headers[SEALED] == started.secret
    shadowed = await read(bus, TurnShadowed, record)
    assert (shadowed.turn_id, shadowed.trial) == (turn, trial)
    assert shadowed.tokens.tolist() == finished.tokens.tolist()[::-1]
