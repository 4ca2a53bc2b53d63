"""A whole run that learns from what people say to its gateway, over kills of everything on the way of a turn."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from asyncrl.bus.connection import Bus
from asyncrl.live.sessions import SESSION_HEADER, session_of
from harness.audited import messages_on
from harness.live_runs import new_key, with_gateway
from harness.recorded import Recorded
from harness.runs import LIMIT_S, PACED, Run, address_of, command, topics_left_in, up
from harness.sdks import sdks
from harness.stage import until
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.ids import LIVE
from topics.topic import BATCHES, SESSIONS, TRAINING
from topics.trajectories import TRAJECTORY_GENERATED, TrajectoryGenerated
from topics.turns import SESSION_CLOSED, TURN_ADMITTED, TURN_SKIPPED

pytestmark = pytest.mark.slow

MOST = 8  # tokens of a reply
PAUSE_S = 0.3  # between conversations, of which a batch takes few
HINTING = """
def judge(evidence):
    return {"score": 1} if "good" in evidence else {"score": -1, "hint": "abc"}
"""


class Teacher:
    """A client whose conversations have two turns: what it says next grades the first, and its feedback the second."""

    def __init__(self, address: str, key: str) -> None:
        self.turns = 0
        self._address, self._key = address, key
        self._stop = False

    async def teach(self) -> None:
        async with sdks(self._address, self._key) as (client, _):
            while not self._stop:
                messages = [{"role": "user", "content": "abc"}]
                first = await self._reply(client, messages)
                word = "good" if len(first.choices[0].message.content) < MOST else "wrong"
                messages += [
                    {"role": "assistant", "content": first.choices[0].message.content},
                    {"role": "user", "content": word},
                ]
                last = await self._reply(client, messages)
                told = {"turn": last.id, "number": 0.5}
                await client.with_options(max_retries=5).post("/feedback", cast_to=object, body=told)
                await asyncio.sleep(PAUSE_S)

    async def _reply(self, client, messages: list[dict[str, str]]):
        self.turns += 1
        return await client.chat.completions.create(model="any", messages=messages, max_tokens=MOST)

    def stop(self) -> None:
        self._stop = True


def niceness(pid: int | None) -> int | None:
    """Return that of a process beside that of the test, where the process is there."""
    return None if pid is None else os.getpriority(os.PRIO_PROCESS, pid) - os.getpriority(os.PRIO_PROCESS, 0)


async def live_groups(bus: Bus) -> list[str]:
    """The turns of live traffic in batches, as often as they are there."""
    packed = (await messages_on(bus, BATCHES)).on(BATCH_PACKED)
    groups = [group for batch in packed for group in batch.groups if group.prompt_id.startswith(LIVE)]
    assert {(len(group.members) > 1, group.estimator) for group in groups} <= {
        (False, "combine_less_others"),
        (True, "combine_rloo"),
    }
    return [group.prompt_id for group in groups]


@pytest.mark.real_start
async def test_turns_are_trained_once_each_whatever_dies(tmp_path: Path):
    settings, address = with_gateway(tmp_path, experts=True)
    more = [
        "learner.routing=replay",
        "live.fraction=0.5",
        "live.idle_s=2",
        "live.advantage=less_others",
        "learner.steps=100000",
        "nats.keep=run",
    ]
    (tmp_path / "hinting.py").write_text(HINTING)
    more += ["live.judge.kind=rule", f"live.judge.function={tmp_path / 'hinting.py'}:judge"]
    more += ["live.method=combine", "live.hindsight.wording={hint}", "gateway.queue_timeout_s=180", PACED]
    async with up(tmp_path, *settings, *more) as run:
        key = await new_key(tmp_path, address)
        bus = await Bus.connect(address_of(run), "short")
        teacher = Teacher(address, key)
        teaching = asyncio.create_task(teacher.teach())
        others = ("gateway-1", "engine-1", "supervisor-1", "judge-1")
        await run.reaches(lambda: [niceness(run.actor(name)) for name in others] == [0, 0, 0, 1], "its judge gives way")
        for role in ("judge-1", "sessions-1", "prompter-1", "rollout-1"):
            await more_trained(run, bus, f"turns are trained before {role} dies")
            await run.kill(role)
        await more_trained(run, bus, "turns are trained after that")
        pairs = await siblings_are_one_group(bus, address, key)
        teacher.stop()
        await teaching
        untrained = await turns_that_are_not_trained(address, key)
        await run_closes(bus, "mine")
        await bus.close()
        code, _ = await command(tmp_path, "down")
        assert (code, await run.ended()) == (0, 0), run.story
    code, output = await command(tmp_path, "audit", "--deep")
    assert code == 0, output
    async with topics_left_in(run.root) as bus:
        trained, sessions = await live_groups(bus), await messages_on(bus, SESSIONS)
        recorded = await Recorded.read(bus, Path((run.root / "base").read_text()))
    assert "foreign tokens" not in recorded.kinds()
    results = recorded.messages(TRAJECTORY_GENERATED)
    assert any(result.segments[0].hinted for result in results)
    live = [result.routing for result in results if result.prompt_id.startswith(LIVE)]
    known = [np.unpackbits(np.frombuffer(one.known, np.uint8))[: one.tokens[-1]] for one in live if one is not None]
    assert len(known) == len(live) and np.concatenate(known).mean() > 0.8  # all but last ones, and what the dead had
    prompts = [result.prompt_id for result in results]
    recorded.alter(TRAJECTORY_GENERATED, prompts.index(trained[-1]), plant)
    assert "foreign tokens" in recorded.kinds()
    assert len(trained) == len(set(trained)) >= 4
    groups = sessions.on(TURN_ADMITTED)
    admitted = [turn.turn_id for group in groups for turn in group.turns]
    assert {turn.by for group in groups for turn in group.turns} == {"judge", "user"}
    ended = admitted + [turn.turn_id for turn in sessions.on(TURN_SKIPPED)]
    assert len(ended) == len(set(ended)), "a turn has one end"
    assert untrained.items() <= {turn.turn_id: turn.reason for turn in sessions.on(TURN_SKIPPED)}.items()
    assert max(int(name[1:]) for name in trained) < len(groups) < len(admitted) <= teacher.turns + 2 * pairs


async def siblings_are_one_group(bus: Bus, address: str, key: str) -> int:
    """Ask for two replies and speak about both, until two are one group of a batch; returns how often.

    A group that is too old when its batch is packed is dropped.
    """
    pairs = 0

    async def packed() -> bool:
        nonlocal pairs
        pairs += 1
        async with sdks(address, key) as (client, _):
            asked = {"model": "any", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 2, "n": 2}
            raw = await client.chat.completions.with_raw_response.create(**asked)
            for turn, number in zip(raw.headers["x-asyncrl-turn"].split(","), (1.0, -1.0), strict=True):
                told = {"turn": turn, "number": number}
                await client.with_options(max_retries=5).post("/feedback", cast_to=object, body=told)
        batches = (await messages_on(bus, BATCHES)).on(BATCH_PACKED)
        groups = [group for batch in batches for group in batch.groups if group.estimator == "combine_rloo"]
        return any([member.reward for member in group.members] == [1.0, -1.0] for group in groups)

    await until(packed, "siblings are in a batch", 300)
    return pairs


async def turns_that_are_not_trained(address: str, key: str) -> dict[str, str]:
    """Ask as no turn can be trained, in a session that the client ends; returns the reason for each turn."""
    ways = {
        "side": {"extra_headers": {"x-asyncrl-turn-type": "side"}},
        "greedy": {"temperature": 0.0},
        "truncated": {"top_p": 0.5},
    }
    found = {}
    async with sdks(address, key) as (client, _):
        own = client.with_options(default_headers={"x-asyncrl-session": "mine"})
        for reason, how in ways.items():
            asked = {"model": "any", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
            raw = await own.chat.completions.with_raw_response.create(**asked, **how)
            assert raw.headers["x-asyncrl-session"] == "mine"
            found[raw.headers["x-asyncrl-turn"]] = reason
        deleted = await own.delete("/sessions/mine", cast_to=object)
        assert deleted["deleted"]
    return found


async def run_closes(bus: Bus, name: str) -> None:
    """Wait until the keeper has closed a session of the tenant that its client ended."""
    session = session_of("anna", {SESSION_HEADER: name}, "", "").id

    async def closed() -> bool:
        ended = (await messages_on(bus, SESSIONS)).on(SESSION_CLOSED)
        return any(one.session_id == session and one.reason == "left" for one in ended)

    await until(closed, f"session {name} is closed")


def plant(result: TrajectoryGenerated) -> None:
    """Put an id into a reply that no engine gave."""
    tokens = result.segments[0].tokens.copy()
    tokens[-1] += 1
    result.segments[0].tokens = tokens


async def more_trained(run: Run, bus: Bus, what: str) -> None:
    """Wait until more turns are in batches that are trained."""
    before = len(await live_groups(bus))

    async def enough() -> bool:
        trained = max((one.step for one in (await messages_on(bus, TRAINING)).on(BATCH_TRAINED)), default=-1)
        return len(await live_groups(bus)) > before and trained >= 1

    async with asyncio.timeout(LIMIT_S):
        while not await enough():
            await run.reaches(lambda: True, what)
            await asyncio.sleep(0.2)
