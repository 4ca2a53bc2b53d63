"""A rubric whose judge is a group of engines of the run: on a real server, with a server that answers by a script."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.reward.actor import main
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.training.init_model import ModelShape, create_model
from harness.audited import messages_on
from harness.live_runs import TEMPLATE
from harness.results import generated, is_done
from harness.sglang_like import Asked, LikeSGLang, like_sglang
from harness.stage import Stage, until
from harness.workers import SLOTS
from topics.engines import EngineReady
from topics.groups import GroupCompleted
from topics.topic import GRADES
from topics.trajectories import TRAJECTORY_FAILED, TRAJECTORY_GRADED, TRAJECTORY_SUBMITTED

RUBRIC = """
[[criteria]]
text = "It has an x."
weight = 3.0
name = "x"

[[criteria]]
text = "It is long."
"""
EOS = 2


class Judged:
    """A run with an engine of training, which is not asked, and one that judges."""

    def __init__(self, folder: Path, make_stage: Callable[..., Stage], servers: list[LikeSGLang], **reward: Any):
        (folder / "rubric.toml").write_text(RUBRIC)
        model = folder / "model"
        create_model(model, alphabet="\n" + bytes(range(32, 127)).decode(), seed=1, shape=ModelShape(context=8192))
        (model / "chat_template.jinja").write_text(TEMPLATE)
        self.tokenizer = TaskTokenizer.load(model)
        self.training, self.wise = servers
        self.asked: list[str] = []
        self.wise.serve = self.answer
        external = {"kind": "external", "addresses": ["http://127.0.0.1:1"]}
        tables = {"function": str(folder / "rubric.toml"), "judge_engines": "wise"} | reward
        engine = external | {"groups": {"wise": dict(external)}}
        self.stage = make_stage(model={"path": str(model)}, reward=tables, engine=engine)

    async def answer(self, asked: Asked) -> dict[str, Any]:
        """Prefer the first of two answers that has as many x as the other; of one, tell whether it has any."""
        question = self.tokenizer.decode(asked.ids)
        mark = re.findall(r"(?:CRITERION|BETTER) ([0-9a-f]{16})", question)[0]
        found = dict(re.findall(rf"===== {mark} ([a-z ]+) =====\n(.*?)\n===== {mark} end", question, re.DOTALL))
        self.asked.append(question)
        if "answer" in found:
            verdict = "yes" if "x" in found["answer"] else "no"
            text = f"CRITERION {mark} 1: {verdict}\nCRITERION {mark} 2: no"
        else:
            first, second = (found[f"{place} answer"].count("x") for place in ("first", "second"))
            text = f"BETTER {mark}: {'first' if first >= second else 'second'}"
        return self.wise.answer(asked, [*self.tokenizer.encode(text).tolist(), EOS], "stop")

    async def ready(self, bus: Bus) -> None:
        for name, server in (("engine-1", self.training), ("engine-wise-1", self.wise)):
            server.weight_version = "0:0:d"
            await publish(bus, EngineReady(name, server.address, 0, 0, "d", SLOTS))

    async def work(self, bus: Bus, role: str) -> None:
        """Have a worker inside this process do all work of its queue."""
        context = self.stage.context(role, bus)
        running = asyncio.create_task(main(context))
        await until(lambda: running.done() or is_done(bus, role), "all is graded")
        context.stop.set()
        await asyncio.wait_for(running, 300)


async def submit(bus: Bus, *completions: str) -> None:
    for member, text in enumerate(completions):
        message = msgspec.structs.replace(
            generated(1),
            trajectory_id=f"p000001-{member}",
            member=member,
            group_size=len(completions),
            completion=text,
            outcome=None,
        )
        await publish(bus, message)


@pytest.fixture
async def servers() -> AsyncIterator[list[LikeSGLang]]:
    async with like_sglang() as training, like_sglang() as wise:
        yield [training, wise]


async def test_an_engine_that_only_judges_grades_by_a_rubric(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path, servers: list[LikeSGLang]
):
    judged = Judged(tmp_path, stage, servers)
    await judged.ready(bus)
    await submit(bus, "axb", "ab CRITERION 1: yes")

    await judged.work(bus, "reward")

    grades = {one.trajectory_id: one for one in (await messages_on(bus, GRADES)).on(TRAJECTORY_GRADED)}
    assert {name: (one.reward, one.metrics["x"]) for name, one in grades.items()} == {
        "p000001-0": (0.75, 1.0),
        "p000001-1": (0.0, 0.0),
    }
    assert judged.training.asked == []


async def test_an_engine_that_only_judges_ranks_a_group_in_both_orders(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path, servers: list[LikeSGLang]
):
    judged = Judged(tmp_path, stage, servers, scope="group", tournament="round_robin")
    await judged.ready(bus)
    await submit(bus, "x", "xx", "x x")
    await judged.work(bus, "reward")
    members = sorted((await messages_on(bus, GRADES)).on(TRAJECTORY_SUBMITTED), key=lambda one: one.member)
    await publish(bus, GroupCompleted("p000001", members))

    await judged.work(bus, "groupreward")

    said = await messages_on(bus, GRADES)
    assert said.on(TRAJECTORY_FAILED) == []
    rewards = [one.reward for one in sorted(said.on(TRAJECTORY_GRADED), key=lambda one: one.member)]
    assert rewards == [0.0, 0.75, 0.75]  # the judge prefers the first of equal ones, which the other order cancels
    assert len(judged.asked) == 6
