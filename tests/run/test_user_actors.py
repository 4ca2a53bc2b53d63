"""An actor from a folder of the user's own, named in the config: everything else follows from its rows."""

import os
import re
import signal
from pathlib import Path

import pytest

from asyncrl.run.user_actors import ActorsError, load_actors
from harness.runs import command, up
from harness.stage import until

CRITIC = '''
"""A critic: every grade gets a remark."""
from __future__ import annotations

from asyncrl import Message, Retention, Role, Stream, Topic, WorkerLoop

REMARKS = Stream("REMARKS", Retention.LEDGER, about="remarks about grades")


class RemarkMade(Message):
    """A remark about a grade."""

    trajectory_id: str
    reward: float


ROLE = Role("critic", "worker", stops=4, queue="trajectory.graded", scalable=True)
TOPICS = [Topic(RemarkMade, REMARKS, ["critic"], ["operator"], key="trajectory_id")]


async def main(context):
    async def handle(graded, delivery):
        return [RemarkMade(graded.trajectory_id, graded.reward)]

    await WorkerLoop(context, handle, slots=8).run()
'''
ROW = "from asyncrl import Role\nROLE = Role"
QUICK = ["engine.kind=scripted", "learner.trainer=scripted", "warmup.steps=0", "learner.steps=100000", "eval.prompts=0"]
QUICK += ["learner.scripted_step_s=0.3", "buffer.batch_groups=2", "rollout.group_size=2"]
QUICK += ["workers.lease_s=1.0"]  # what a critic had when it was killed passes on before its stop


def made(folder: Path) -> str:
    (folder / "critic.py").write_text(CRITIC)
    return f'actors=["{folder / "critic.py"}"]'


async def named_on(folder: Path, topic: str) -> list[str]:
    """Return the trajectories that the messages of a topic name, in their order."""
    code, text = await command(folder, "tap", "short", topic, "--from-start", "--no-follow", "--json")
    assert code == 0, text
    return re.findall(r'"trajectory_id": ?"([^"]+)"', text)


@pytest.mark.slow
async def test_a_users_actor_is_started_scaled_and_shown_and_loses_nothing_when_it_is_killed(tmp_path: Path):
    async with up(tmp_path, *QUICK, made(tmp_path)) as run:
        name = run.root.name
        await run.reaches(run.steps, "a trained step")
        code, text = await command(tmp_path, "scale", name, "critic=2")
        assert code == 0, text
        critics = ("critic-1", "critic-2")
        await run.reaches(lambda: all(map(run.actor, critics)), "two critics")
        killed = {critic: run.actor(critic) for critic in critics}
        for pid in killed.values():
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        await run.reaches(lambda: all(run.actor(critic) not in (None, killed[critic]) for critic in critics), "others")
        await run.reaches(lambda: len(run.steps()) > 5, "steps of two groups of two each")
        graded = await named_on(tmp_path, "trajectory.graded")

        async def all_remarked() -> bool:
            return set(graded) <= set(await named_on(tmp_path, "remark.made"))

        await until(all_remarked, "remarks about all that was graded before", 180)
        code, text = await command(tmp_path, "down", name)
        assert code == 0, text
        assert await run.ended() == 0, run.story

    names = await named_on(tmp_path, "remark.made")
    assert len(names) == len(set(names)) >= len(graded) > 20  # a repeated grade is the same remark
    code, text = await command(tmp_path, "audit", name)
    assert code == 0, text


async def test_topics_and_the_asyncapi_document_show_the_rows_of_a_users_actor(tmp_path: Path):
    (tmp_path / "mine.toml").write_text("actors = ['critic.py']\n")
    made(tmp_path)

    for form in ((), ("--asyncapi",), ("--markdown",)):
        code, text = await command(tmp_path, "topics", "--config", "mine.toml", *form)
        assert code == 0, text
        assert "remark.made" in text
        assert any("trajectory.graded" in line and "critic" in line for line in text.splitlines())
        assert "A remark about a" in text
    (tmp_path / "mine.toml").write_text("actors = ['critics.py']\n")
    code, text = await command(tmp_path, "check", "mine.toml")
    assert (code, text.partition(" no file ")[0]) == (1, "mine.toml:1: actors: critics.py:")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it has no ROLE and no TOPICS and no main"),
        ("ROLE = 1\nTOPICS = []\nmain = print", "a ROLE that is no asyncrl.Role"),
        (
            f"{ROW}('buffer', 'worker', 1)\nTOPICS = []\nmain = print",
            "no name for a role",
        ),
        (
            f"{ROW}('odd', 'worker', 1, queue='no.such')\nTOPICS = []\nmain = print",
            "odd subscribes to no.such, which is no topic",
        ),
        (CRITIC.replace('"REMARKS"', '"GRADES"').replace("critic", "other"), "'GRADES' is no name for a stream"),
        (CRITIC.replace('["critic"]', '["reward"]').replace('"critic"', '"third"'), "must be published by third"),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_what_to_change(tmp_path: Path, text: str, words: str):
    (tmp_path / "wrong.py").write_text(text)

    with pytest.raises(ActorsError, match=words):
        load_actors(["wrong.py"], tmp_path)
