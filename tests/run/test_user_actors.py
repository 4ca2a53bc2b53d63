"""An actor from a folder of the user's own, named in the config: everything else follows from its rows."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.provision import queue_states, stream_states
from asyncrl.run.user_actors import ActorsError, load_actors
from asyncrl.state.run_state import RunState
from asyncrl.state.watch import Watch
from harness.runs import command, up
from harness.stage import Connect, provision_leased, until
from topics.actors import ACTOR_STARTED
from topics.table import BUILT_IN
from topics.wire import Message

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
NAMED = "['critic'], ['operator'], key='trajectory_id'"
TOPIC = 'Topic(RemarkMade, REMARKS, ["critic"], ["operator"], key="trajectory_id")'
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


@pytest.mark.real_start
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


@pytest.mark.slow
async def test_a_users_actor_whose_main_returns_is_started_again_and_ends_the_run_aloud(tmp_path: Path):
    (tmp_path / "idle.py").write_text(
        f"{ROW}('idle', 'service', 5)\nTOPICS = []\nasync def main(context): context.log.info('done')\n"
    )
    async with up(tmp_path, *QUICK, "supervision.deaths=3", f'actors=["{tmp_path / "idle.py"}"]') as run:
        assert await run.ended() == 1

    assert "idle-1 started again" in run.story
    assert "run short failed: idle-1: its main returned, and nothing had asked it to leave" in run.story


@pytest.mark.slow
@pytest.mark.parametrize("other", ["trajectory.failed", "batch.packed"])  # on the same stream, and on another one
async def test_a_run_whose_actor_reads_another_queue_now_is_not_resumed(tmp_path: Path, other: str):
    async with up(tmp_path, *QUICK, made(tmp_path), "learner.steps=2") as run:
        assert await run.ended() == 0, run.story
    (tmp_path / "critic.py").write_text(CRITIC.replace("trajectory.graded", other))

    words = ("--set", "learner.steps=4", "--refresh-code")
    code, output = await command(tmp_path, "up", "--resume", "short", *words)

    words = f"hands out asyncrl.short.trajectory.graded.*, and is to hand out asyncrl.short.{other}"
    assert (code, words in output, "critic" in output) == (1, True, True), output


async def test_topics_and_the_asyncapi_document_show_the_rows_of_a_users_actor(tmp_path: Path):
    (tmp_path / "mine.toml").write_text("actors = ['critic.py']\n")
    made(tmp_path)

    for form in ((), ("--asyncapi",), ("--markdown",)):
        code, text = await command(tmp_path, "topics", "--config", "mine.toml", *form)
        assert code == 0, text
        assert "remark.made" in text
        rows = [part.partition("trajectory.failed")[0] for part in text.split("trajectory.graded")[1:]]  # some wrap
        assert any("critic" in row for row in rows)
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


def critic(before: str, after: str) -> str:
    """The critic with one part of it replaced."""
    assert before in CRITIC
    return CRITIC.replace(before, after)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (critic('"critic", "worker"', '"operator", "worker"'), "'operator' is no name for a role"),
        (critic('"critic", "worker"', '"monitor", "worker"'), "'monitor' is no name for a role"),
        (
            f"{ROW}('recorder', 'service', 5)\nTOPICS = []\nasync def main(context): ...",
            "'recorder' is no name for a role",
        ),
        (critic('"worker"', '"werker"'), "kind is 'werker'; expected one of worker, keeper, service"),
        (critic("stops=4", "stops=6"), "stops is 6; expected a phase, 1 to 5"),
        (critic("stops=4", "stops='4'"), "stops is '4'; expected a phase, 1 to 5"),
        (critic("scalable=True", "setting='reward.workers'"), "settings are of asyncrl's roles; give processes"),
        (
            critic("[Topic(", "[Topic(OtherMade, Stream('REMARKS', Retention.LEDGER), ['critic'], []), Topic(").replace(
                "ROLE =", "class OtherMade(Message): ...\nROLE ="
            ),
            "stream REMARKS is made twice; make it once, and give it to each of its topics",
        ),
        (critic('"worker"', '"keeper"'), "a keeper is one process, with a spare; leave `scalable` out"),
        (critic('["operator"]', '["critics"]'), "its subscriber 'critics' is no role; there are "),
        (critic("scalable=True", "processes=-1"), "processes is -1; expected 0 to 1024"),
        (critic(' queue="trajectory.graded",', ""), "a worker has a queue: the topic that its processes share"),
        (critic("scalable=True", "subscribes='eval.scored'"), r"expected a tuple of topics: \('eval.scored',\)"),
        (
            critic('"worker"', '"keeper"').replace(", scalable=True", ""),
            "the streams that it keeps are none; expected one Stream with Retention.LEDGER",
        ),
        (critic("LEDGER,", "LEDGER, keeper='critic',"), "REMARKS has a keeper, and role critic is a worker"),
        (critic("[Topic(", "[RemarkMade, Topic("), "its TOPICS have RemarkMade; expected asyncrl.Topic"),
        (critic(f"[{TOPIC}]", TOPIC), "its TOPICS are Topic"),
        (critic("REMARKS, [", "'REMARKS', ["), "its stream is str 'REMARKS'; expected an asyncrl.Stream"),
        (critic('["critic"]', '"critic"'), "its publishers are str 'critic'; expected a list or tuple of names"),
        (critic('key="trajectory_id"', "key='trajectory'"), "no field 'trajectory' for its key or id; it has"),
        (critic('key="trajectory_id"', "id=('attempt',)"), "no field 'attempt' for its key or id; it has"),
        (critic('key="trajectory_id"', "id=('reward')"), "its id are str 'reward'; expected a list or tuple of names"),
        (critic("[Topic(", f"[{TOPIC}, Topic("), "'remark.made' is no new NOUN.PARTICIPLE"),
        (
            critic("key=", "name='other.made', key=").replace("[Topic(", f"[{TOPIC}, Topic("),
            "give it a separate type",
        ),
        (critic("RemarkMade(Message)", "RemarkMade"), "its message is RemarkMade; expected a class derived from"),
        (critic("reward: float", "reward: Nothing"), "cannot be read from the wire: name 'Nothing' is not defined"),
        (
            critic("async def main(context)", "async def main()"),
            r"called with a context, and too many positional arguments; expected ROLE, TOPICS and",
        ),
        (
            f"{critic('async def main', 'async def of')}\nmain = print",
            "its main is no async function; expected ROLE, TOPICS",
        ),
    ],
)
def test_rows_from_which_no_actor_follows_are_refused_with_what_to_change(tmp_path: Path, text: str, words: str):
    (tmp_path / "wrong.py").write_text(text)

    with pytest.raises(ActorsError, match=words):
        load_actors(["wrong.py"], tmp_path)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Taken = TrajectoryGraded", "its message TrajectoryGraded is that of trajectory.graded"),
        ("class Taken(TrajectoryGraded): ...", "Taken has the GradeHeaders of another type"),
    ],
)
def test_a_message_that_is_one_of_asyncrl_or_has_its_headers_is_refused(tmp_path: Path, kind: str, words: str):
    topic = f"Topic(Taken, REMARKS, {NAMED}, name='remark.taken')"
    graded = "from topics.trajectories import TrajectoryGraded"
    (tmp_path / "wrong.py").write_text(f"{CRITIC}\n{graded}\n{kind}\nTOPICS = [{topic}]")

    with pytest.raises(ActorsError, match=words):
        load_actors(["wrong.py"], tmp_path)


@pytest.mark.parametrize("topics", ["None", "[int]", "[Topic(int, None, [], [])]"])
def test_rows_that_are_none_are_told_whichever_actor_is_named_first(tmp_path: Path, topics: str):
    (tmp_path / "good.py").write_text(CRITIC)
    other = CRITIC.replace("critic", "other").replace("REMARKS", "OTHERS")
    (tmp_path / "bad.py").write_text(f"{other}\nTOPICS = {topics}\n")

    for names in (["good.py", "bad.py"], ["bad.py", "good.py"]):
        with pytest.raises(ActorsError, match=r"actors: bad\.py: "):
            load_actors(names, tmp_path)


def test_of_two_actors_with_one_name_topic_or_stream_none_is_added(tmp_path: Path):
    (tmp_path / "critic.py").write_text(CRITIC)
    (tmp_path / "twin.py").write_text(CRITIC)  # equal rows, another program
    other = CRITIC.replace('"critic"', '"other"')
    (tmp_path / "topic.py").write_text(other.replace('"REMARKS"', '"OTHERS"'))
    (tmp_path / "stream.py").write_text(other.replace("RemarkMade", "OtherMade"))

    for twin, words in (
        ("twin", "'critic' is no name"),
        ("topic", "'remark.made' is no"),
        ("stream", "'REMARKS' is no"),
    ):
        with pytest.raises(ActorsError, match=words):
            load_actors(["critic.py", f"{twin}.py"], tmp_path)


async def test_actors_may_read_what_each_other_publish_in_whatever_order_they_are_named(tmp_path: Path):
    (tmp_path / "critic.py").write_text(CRITIC.replace("trajectory.graded", "reply.made"))
    other = CRITIC.replace('"critic"', '"replier"').replace("REMARKS", "REPLIES").replace("RemarkMade", "ReplyMade")
    (tmp_path / "replier.py").write_text(other.replace("trajectory.graded", "remark.made"))
    for order in ("'critic.py', 'replier.py'", "'replier.py', 'critic.py'"):
        (tmp_path / "mine.toml").write_text(f"actors = [{order}]\n")

        code, text = await command(tmp_path, "topics", "--config", "mine.toml")

        assert code == 0, text
        found = {line.split()[0]: line for line in text.splitlines() if ".made" in line}
        assert "replier" in found["remark.made"], text
        assert "critic" in found["reply.made"], text


def test_loading_actors_changes_no_table_of_another_run(tmp_path: Path):
    found, before = [], (BUILT_IN.roles, BUILT_IN.streams, BUILT_IN.topics, dict(BUILT_IN.queues))
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        made(tmp_path / name)
        found.append(load_actors(["critic.py"], tmp_path / name))

    assert (BUILT_IN.roles, BUILT_IN.streams, BUILT_IN.topics, BUILT_IN.queues) == before
    for tables in found:
        assert tables.queues_of("critic")[0].topic is tables.by_name["trajectory.graded"]
        assert "critic" in tables.publishers_of(ACTOR_STARTED)
        assert "critic" in tables.subscribers_of(tables.by_name["trajectory.graded"])
    one, other = (tables.by_name["remark.made"].message for tables in found)
    assert one is not other


async def test_a_process_that_has_loaded_the_actor_of_one_run_reads_the_state_of_another(
    bus: Bus, connect: Connect, tmp_path: Path
):
    made(tmp_path)
    own = await connect("own")
    own.tables = load_actors(["critic.py"], tmp_path)
    await provision_leased(own, 5.0)

    assert (await stream_states(own)).keys() - (await stream_states(bus)).keys() == {"REMARKS"}
    assert (await queue_states(own)).keys() - (await queue_states(bus)).keys() == {"critic"}
    for watched in (bus, own):
        watch = Watch(watched, RunState(watched.run))
        await watch.start()
        await watch.examine()
        await watch.close()


async def test_an_actor_imports_the_messages_of_a_file_beside_it(tmp_path: Path):
    (tmp_path / "critic.py").write_text(CRITIC)
    other = CRITIC.replace('"critic"', '"replier"').replace("REMARKS", "REPLIES").replace("RemarkMade", "ReplyMade")
    imports = "from critic import RemarkMade\n"
    ending = "\nprint('published as', tables.topic_for(RemarkMade('p000001-1', 1.0)).name)\n"
    (tmp_path / "replier.py").write_text(other.replace("from asyncrl", f"{imports}from asyncrl", 1))
    (tmp_path / "program.py").write_text(
        "from pathlib import Path\nfrom asyncrl.run.user_actors import load_actors\n"
        f"tables = load_actors(['replier.py', 'critic.py'], Path())\n{imports}{ending}"
    )

    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )

    assert done.stdout == "published as remark.made\n", done.stderr


def test_a_class_of_the_same_name_from_another_module_is_told_apart():
    class TrajectoryGraded(Message):
        """Another one."""

    with pytest.raises(LookupError, match=r"that of topic trajectory.graded is of module topics.trajectories"):
        BUILT_IN.topic_for(TrajectoryGraded())
