"""A whole run in which canaries are rolled back and promoted by what users say, and a shadow is compared by a judge."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.data.tokenizer import TaskTokenizer
from harness.audited import messages_on
from harness.gateways import finished_turn, turns_of
from harness.live_runs import moved, new_key, newest, with_gateway
from harness.runs import UNTRAINED, address_of, command, up
from harness.sdks import openai, sdks
from harness.stage import until
from topics.promotions import CANARY_ENDED, WEIGHTS_CANARIED, WEIGHTS_PROMOTED
from topics.topic import FLEET, TURNS, Topic
from topics.turns import TURN_JUDGED, TURN_SHADOWED, TurnFinished

pytestmark = pytest.mark.slow

GROUPS = [f"engine.groups.{name}.kind=embedded" for name in ("train", "served", "canary")]
SERVED = ["gateway.engines=served", "gateway.canary_engines=canary", "weights.canary.turns=6"]
PATIENCE = [
    "gateway.queue_timeout_s=180",
    "engine.start_deadline_s=300",
    "live.idle_s=600",
    "learner.keep_versions=300",
]
SIDES = ("canary_turns", "others_turns")
PAIRS = 3  # fewer than decide
JUDGE = """
def judge(reply):
    return 1 if sum(map(ord, reply)) % 2 else -1
"""


class Users:
    """Clients in sessions of two turns, who say of each reply what they think of its version."""

    def __init__(self, bus: Bus, address: str, key: str) -> None:
        self._bus, self._address, self._key = bus, address, key
        self._sessions = 0

    async def talk(self, opinion: Callable[[TurnFinished], float]) -> set[int]:
        """Hold a session; returns the versions of its replies."""
        self._sessions += 1
        versions: set[int] = set()
        headers = {"x-asyncrl-session": f"session-{self._sessions}"}
        async with sdks(self._address, self._key) as (client, _):
            for _turn in range(2):
                with suppress(openai.APIError):  # everything dies with the supervisor, and is started again
                    reply = await client.chat.completions.with_raw_response.create(
                        model="any",
                        messages=[{"role": "user", "content": "abc"}],
                        max_tokens=4,
                        extra_headers=headers,
                    )
                    turn = await finished_turn(self._bus, reply.headers["x-asyncrl-turn"])
                    versions |= {*turn.versions.tolist()}
                    body = {"turn": turn.turn_id, "number": opinion(turn)}
                    await client.post("/feedback", cast_to=object, body=body)
        return versions

    async def hold_their_tongues(self) -> str:
        """Hold a session of one turn, and end it once a shadow has answered; returns the turn."""
        self._sessions += 1
        name = f"session-{self._sessions}"
        async with sdks(self._address, self._key) as (client, _):
            reply = await client.chat.completions.with_raw_response.create(
                model="any",
                messages=[{"role": "user", "content": "abc"}],
                max_tokens=4,
                extra_headers={"x-asyncrl-session": name},
            )
            turn: str = reply.headers["x-asyncrl-turn"]
            await until(lambda: has_shadow(self._bus, turn), "a version answers unseen", 180)
            await client.delete(f"/sessions/{name}", cast_to=object)
        return turn

    async def until_decided(self, topic: Topic, count: int, opinion: Callable[[TurnFinished], float]) -> None:
        """Talk until there are so many messages of a topic."""

        async def decided() -> bool:
            await self.talk(opinion)
            return len((await messages_on(self._bus, FLEET)).on(topic)) >= count

        await until(decided, f"{topic.name}, number {count}", 240)


@pytest.mark.nightly  # test_channels_run.py has a channel in a run every day
async def test_users_roll_a_canary_back_and_promote_the_next_over_kills_of_the_supervisor(tmp_path: Path):
    settings, address = with_gateway(tmp_path)
    (tmp_path / "judging.py").write_text(JUDGE)
    judged = ["live.judge.kind=rule", f"live.judge.function={tmp_path / 'judging.py'}:judge"]
    more = [*GROUPS, *SERVED, *PATIENCE, *UNTRAINED, *judged, "learner.scripted_step_s=1.0", "learner.steps=100000"]
    async with up(tmp_path, *settings, *more) as run:
        key = await new_key(tmp_path, address)
        bus = await Bus.connect(address_of(run), "short")
        users = Users(bus, address, key)
        [first] = await users.talk(lambda _: 1.0)
        await run.reaches(lambda: len(run.steps()) >= 2, "training moves on")

        bad = await moved(tmp_path, "promote", str(await newest(tmp_path)), "--canary", "0.5")
        await run.kill("supervisor-1")  # its decision is on the log, and nothing has followed from it
        await users.until_decided(CANARY_ENDED, 1, lambda turn: -1.0 if turn.canary else 1.0)
        await run.kill("supervisor-1")
        _, finished = await turns_of(bus)
        compared = [turn for turn in finished.values() if turn.trial]
        assert {turn.canary: {*turn.versions.tolist()} for turn in compared} == {True: {bad}, False: {first}}
        sides: dict[str, set[bool]] = {}
        for turn in compared:
            sides.setdefault(turn.session, set()).add(turn.canary)
        assert all(len(side) == 1 for side in sides.values()), "a session stays on its side"

        async def is_back() -> bool:
            return await users.talk(lambda _: 1.0) == {first}

        await until(is_back, "everybody has what is live", 180)
        good = await moved(tmp_path, "promote", str(await newest(tmp_path)), "--canary", "0.5", "--wait", "120")
        await users.until_decided(WEIGHTS_PROMOTED, 2, lambda _: 1.0)
        await run.kill("supervisor-1")
        await until(lambda: answered(users, {good}), "everybody has the canary that was promoted", 180)
        fleet = await messages_on(bus, FLEET)
        assert [one.version for one in fleet.on(WEIGHTS_CANARIED)] == [bad, good]
        assert [(one.version, one.by) for one in fleet.on(WEIGHTS_PROMOTED)] == [(first, "start"), (good, "canary")]
        assert len(fleet.on(CANARY_ENDED)) == 1

        async def is_trained_further() -> bool:
            return await newest(tmp_path) > good

        await until(is_trained_further, "training goes on", 180)
        await moved(tmp_path, "promote", str(await newest(tmp_path)), "--shadow", "1", "--wait", "120")

        async def is_shadowed() -> bool:
            assert await users.talk(lambda _: 1.0) == {good}
            return bool((await messages_on(bus, TURNS)).on(TURN_SHADOWED))

        await until(is_shadowed, "a version answers users unseen", 180)
        await assert_compared(tmp_path, bus, {await users.hold_their_tongues() for _ in range(PAIRS)})
        await asyncio.wait_for(bus.close(), 120)
        code, output = await command(tmp_path, "weights", "list")
        assert (code, "canary rolled back: mean reward of its" in output, " shadow " in output) == (0, True, True)
        assert max(map(len, output.splitlines()[:2])) <= 80  # fits a terminal, wherever the run lies
        code, _ = await command(tmp_path, "down")
        assert (code, await run.ended()) == (0, 0), run.story
    code, output = await command(tmp_path, "audit", "--deep")
    assert code == 0, output


async def answered(users: Users, versions: set[int]) -> bool:
    return await users.talk(lambda _: 1.0) == versions


async def has_shadow(bus: Bus, turn: str) -> bool:
    return turn in {one.turn_id for one in (await messages_on(bus, TURNS)).on(TURN_SHADOWED)}


async def assert_compared(folder: Path, bus: Bus, turns: set[str]) -> None:
    """The judge graded what users got and what the shadow said, by their texts; the means are those of the pairs."""

    async def figures() -> dict[str, float]:
        _, output = await command(folder, "weights", "list", "--json")
        return next((row["compared"] for row in json.loads(output) if row["shadow"]), {})

    async def are_compared() -> bool:
        return (await figures()).get("canary_turns") == len(turns)

    await until(are_compared, "the turns are compared", 180)
    tokenizer = TaskTokenizer.load(folder / "conversing")

    def score(tokens: Any) -> float:
        return 1.0 if sum(map(ord, tokenizer.decode(tokens))) % 2 else -1.0

    stored, (_, finished) = await messages_on(bus, TURNS), await turns_of(bus)
    shadows = {one.turn_id: score(one.tokens) for one in stored.on(TURN_SHADOWED) if one.turn_id in turns}
    graded = {one.turn_id: (one.reward, one.shadow) for one in stored.on(TURN_JUDGED)}
    assert graded == {turn: (score(finished[turn].tokens), shadows[turn]) for turn in turns}
    means = [sum(rewards) / len(turns) for rewards in zip(*graded.values(), strict=True)]
    expected = {"others_reward": means[0], "canary_reward": means[1], **dict.fromkeys(SIDES, float(len(turns)))}
    assert await figures() == pytest.approx(expected)

    async def are_shown() -> bool:
        _, output = await command(folder, "status", "--json")
        [vitals] = [one["vitals"] for one in json.loads(output)["actors"] if one["actor_id"] == "supervisor-1"]
        return {name: vitals.get(name) for name in expected} == pytest.approx(expected)

    await until(are_shown, "the supervisor's vital signs have them", 60)
