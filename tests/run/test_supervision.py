"""`asyncrl up` keeps its server and its supervisor alive, and goes on with runs that were stopped or killed."""

import json
import os
import shutil
import signal
import socket
from pathlib import Path

import msgspec
import pytest

from actors.supervisor.fold import SupervisorFold
from asyncrl.cli.main import run as run_command
from asyncrl.config.load import ConfigError
from asyncrl.config.process_settings import SupervisionSettings
from asyncrl.config.settings import Config
from asyncrl.errors import LaunchError
from asyncrl.process import RestartPolicy
from asyncrl.run.connect import FoundRun, opened
from asyncrl.run.directory import RunFiles, is_locked
from asyncrl.run.launch import Launch
from asyncrl.state.run_state import RunState
from harness.audited import assert_audited, assert_consistent, assert_within_lag, messages_on, topics_left_by
from harness.buffer_feed import feed as buffer_feed
from harness.folds import Feed
from harness.gated import closed_gate
from harness.launches import prepared
from harness.runs import GATED, WITHOUT_MODEL, Run, address_of, command, kill, resume, two_steps_more, up
from harness.stage import until
from topics.actors import (
    ActorStarted,
    ActorStopped,
    RunOpened,
    ScaleRequested,
    StopRequested,
)
from topics.groups import GROUP_DROPPED
from topics.prompts import PROMPT_ISSUED
from topics.topic import BATCHES, PROMPTS, TRAINING

SLOW = pytest.mark.slow
GROUPS, MEMBERS = 8, 4  # of a batch, of a group, in the short config
OPENED = RunOpened(steps=5, warmup_steps=0, settings={})


async def assert_whole(run: Run, steps: int) -> None:
    """All is as if nothing had happened: batches, steps, rows, and each prompt issued once, in order."""
    async with topics_left_by(run) as bus:
        batches, training, prompts = [await messages_on(bus, stream) for stream in (BATCHES, TRAINING, PROMPTS)]
    assert_audited(batches, training, steps)
    assert_consistent(run, steps=steps, warmup_steps=4)
    assert_within_lag(run, max_lag=2)
    issued = [message.trajectory_id for message in prompts.on(PROMPT_ISSUED) if message.stage == "rl"]
    groups = steps * GROUPS + len(batches.on(GROUP_DROPPED))
    assert sorted(issued) == [f"p{number:06d}-{member}" for number in range(groups) for member in range(MEMBERS)]


async def has_vitals(folder: Path) -> bool:
    code, output = await command(folder, "status", "--json")
    assert code == 0, output
    return any(actor["vitals"] for actor in json.loads(output)["actors"])


# --- while it lives


@SLOW
async def test_a_server_killed_twice_and_a_supervisor_killed_once_cost_no_batch(tmp_path: Path):
    weights = ["weights.store=stream", "weights.delta=always"]  # a version may be under way in each of the kills
    gate = closed_gate(tmp_path, 0)
    async with up(tmp_path, GATED, "learner.steps=14", "workers.lease_s=1.0", *weights) as run:
        await two_steps_more(run, "two steps", gate)
        kill(run.server())
        await two_steps_more(run, "two steps on the second server", gate)
        await until(lambda: has_vitals(tmp_path), "vital signs, which live in the server's memory, are there again")
        learner = run.actor("learner-1")
        await run.kill("supervisor-1")
        await until(lambda: learner not in run.processes(), "the actors went with their supervisor")
        await two_steps_more(run, "two steps under the second supervisor", gate)
        kill(run.server())
        gate.unlink()
        assert await run.ended() == 0, run.story

    assert run.out.count("the NATS server died: exit code -9; it is started again") == 2
    assert "supervisor-1 started again" in run.out
    await assert_whole(run, 14)


@SLOW
async def test_a_server_that_cannot_come_back_ends_the_run_with_its_reason(tmp_path: Path):
    async with up(tmp_path, *WITHOUT_MODEL, "learner.steps=5000", "supervision.deaths=3") as run:
        await two_steps_more(run, "two steps")
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            run.process.send_signal(signal.SIGSTOP)  # else it may start the next server first
            kill(run.server())
            await until(lambda: binds(taken, address_of(run).url), "the server has left its port")
            taken.listen()
            run.process.send_signal(signal.SIGCONT)
            assert await run.ended() == 1, run.story

    assert "run short failed: the NATS server died 3 times in a row, at last with nats-server on port" in run.error
    assert "address already in use" in run.error


def binds(taken: socket.socket, url: str) -> bool:
    try:
        taken.bind(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    except OSError:
        return False
    return True


def test_deaths_count_as_long_as_nothing_comes_of_the_lives_between():
    restarts = RestartPolicy(SupervisionSettings())
    for _ in range(8):
        restarts.add(killed=True, worked=False)
    assert restarts.should_give_up

    restarts.add(killed=True, worked=True)
    assert not restarts.should_give_up


def test_a_process_is_given_up_after_eight_quick_deaths():
    restarts, pauses = RestartPolicy(SupervisionSettings()), []
    for _ in range(7):
        restarts.add()
        assert not restarts.should_give_up
        pauses.append(restarts.pause_s)
    restarts.add()

    assert restarts.should_give_up
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.2, 5.0)


async def test_the_settings_say_how_often_and_how_soon_a_process_is_started_again():
    restarts = RestartPolicy(SupervisionSettings(deaths=2, restart_pause_s=0.001))
    restarts.add()
    await restarts.pause()
    assert (restarts.count, restarts.pause_s, restarts.should_give_up) == (1, 0.001, False)
    restarts.add()
    assert restarts.should_give_up

    healthy = RestartPolicy(SupervisionSettings(healthy_s=1e-9))  # and so settled, too
    assert [count_after(healthy, worked=False) for _ in range(2)] == [1, 1]


def count_after(restarts: RestartPolicy, *, worked: bool) -> int:
    restarts.add(worked=worked)
    return restarts.count


# --- resumed


@SLOW
async def test_a_run_that_was_stopped_twice_goes_on_and_takes_more_steps(tmp_path: Path):
    length = ["warmup.steps=4", "learner.steps=20", "learner.checkpoint_every=7"]
    gate = closed_gate(tmp_path, 0)
    async with up(tmp_path, *WITHOUT_MODEL, *length, GATED) as first:
        await two_steps_more(first, "two steps", gate)
        first.interrupt()
        assert await first.ended() == 0, first.story
    assert f"to continue: asyncrl up --resume {first.root}" in first.out

    async with resume(tmp_path, "short") as second:
        await two_steps_more(second, "two steps after the interrupt", gate)
        code, output = await command(tmp_path, "down")
        assert code == 0, output
        assert await second.ended() == 0, second.story
    assert "resumed" in second.out
    assert "step 1 of" not in second.out  # what was shown once is not news

    gate.unlink()
    async with resume(tmp_path, "short", "--set", "learner.steps=24") as third:
        assert await third.ended() == 0, third.story
    events = [line.split(maxsplit=1)[-1] for line in third.out.splitlines() if line]
    assert "finished" in events
    assert "stopped" not in events
    await assert_whole(third, 24)

    async with resume(tmp_path, "short") as fourth:
        assert await fourth.ended() == 1
    assert fourth.error.startswith("run short has finished, nothing is left to do")


@SLOW
@pytest.mark.real_start
async def test_a_run_that_was_killed_with_everybody_goes_on(tmp_path: Path):
    gate = closed_gate(tmp_path, 9)
    settings = ["learner.steps=14", "learner.checkpoint_every=7", "workers.lease_s=1.0", GATED]
    async with up(tmp_path, *settings) as killed:
        await killed.reaches(lambda: len(killed.steps()) >= 9, "a step behind a checkpoint")
        kill(killed.process.pid)
        await killed.ended()
        await until(lambda: not killed.processes(), "nobody is left")
    gate.unlink()

    async with resume(tmp_path, "short") as run:
        assert await run.ended() == 0, run.story
    assert '"event": "checkpoint loaded"' in run.log("learner-1")
    await assert_whole(run, 14)

    (run.root / "summary.json").unlink()  # as if it had been killed between its last step and its last word
    async with resume(tmp_path, "short") as closed:
        assert await closed.ended() == 0, closed.story
    await assert_whole(closed, 14)


@SLOW
async def test_a_run_that_is_stopped_while_it_is_resumed_has_the_end_that_it_had(tmp_path: Path):
    async with up(tmp_path, *WITHOUT_MODEL, "learner.steps=2") as run:
        assert await run.ended() == 0, run.story
    steps = run.summary["steps"]
    async with resume(tmp_path, "short", "--set", "learner.steps=100000") as again:
        await again.reaches(lambda: not (run.root / "summary.json").exists(), "its end counts no more")
        again.interrupt()
        assert await again.ended() == 0, again.story

    assert (RunFiles(run.root).end, run.summary["steps"] >= steps) == ("stopped", True)
    assert "no summary" not in again.out
    Launch.of(run.root, [])  # it can go on: it is longer than it was


@SLOW
async def test_a_run_whose_store_is_gone_is_not_begun_anew_among_its_results(tmp_path: Path):
    async with up(tmp_path, *WITHOUT_MODEL, "learner.steps=2") as run:
        assert await run.ended() == 0, run.story
    shutil.rmtree(run.root / "nats")

    code, output = await command(tmp_path, "up", "--resume", "short", "--set", "learner.steps=4")

    assert (code, "holds no run called short; without its topics it cannot continue" in output) == (1, True), output
    assert RunFiles(run.root).end == "finished"


async def test_a_resumed_run_keeps_its_directory_and_its_settings(tmp_path: Path):
    first = prepared(tmp_path, learner={"steps": 7})
    await first.stop()

    again = Launch.of(first.files.root, ["learner.steps=9"])
    again.prepare()

    assert again.files.root == first.files.root
    assert again.base == first.base
    assert again.files.read_config() == first.config  # until the streams of the other settings are made
    assert again.config.learner.steps == 9
    assert msgspec.structs.replace(again.config, learner=first.config.learner) == first.config
    with pytest.raises(LaunchError, match="run demo is running; watch it with `asyncrl status demo`"):
        Launch.of(first.files.root, []).prepare()
    await again.stop()


async def test_a_run_whose_topics_are_being_read_is_not_resumed_and_its_reader_is_named(tmp_path: Path):
    launch = prepared(tmp_path)
    bus = await launch.start()
    await bus.close()
    await launch.stop()
    root = launch.files.root

    async with opened(FoundRun("demo", root), "audit"):
        assert not is_locked(root)  # it is not live
        with pytest.raises(LaunchError, match=rf"`asyncrl.*` \(process {os.getpid()}\) reads run demo; wait until"):
            Launch.of(root, []).prepare()
    again = Launch.of(root, [])
    again.prepare()
    await again.stop()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("buffer.max_lag=1", "a resumed run keeps its settings, except its lengths"),
        ("task.epochs=2", "the run began with 0; it may be raised, 0 is no end"),
        ("learner.steps=6", "the run began with 7 steps; they may only be raised"),
    ],
)
async def test_a_run_does_not_go_on_with_other_settings(tmp_path: Path, override: str, message: str):
    first = prepared(tmp_path, learner={"steps": 7})
    await first.stop()

    with pytest.raises(LaunchError, match=f"^--set {override}: .*{message}"):
        Launch.of(first.files.root, [override])
    with pytest.raises(ConfigError, match=r'--set learner\.steps: found "many"'):
        Launch.of(first.files.root, ["learner.steps=many"])
    with pytest.raises(ConfigError, match=r"pipeline = 4 is more than the model's 2 layers"):
        Launch.of(first.files.root, ["learner.trainer=megatron", "learner.ranks=4", "learner.layout.pipeline=4"])


async def test_a_run_goes_on_with_another_objective_and_another_length_of_its_schedule(tmp_path: Path):
    first = prepared(tmp_path, learner={"steps": 7, "schedule": "cosine"})
    await first.stop()

    learner = Launch.of(
        first.files.root,
        ["learner.lr=1e-4", "learner.loss=ppo", "learner.loss_options.clip_low=0.1", "learner.steps=9"],
    ).config.learner

    assert (learner.lr, learner.loss, learner.loss_options, learner.steps) == (1e-4, "ppo", {"clip_low": 0.1}, 9)


async def test_a_finished_run_goes_on_only_if_it_is_made_longer(tmp_path: Path):
    first = prepared(tmp_path)
    await first.stop()
    (first.files.root / "summary.json").write_text('{"finished": true}')

    words = "run demo has finished, nothing is left to do; .* --set learner.steps=N, with N above 100"
    with pytest.raises(LaunchError, match=words):
        Launch.of(first.files.root, [])
    assert Launch.of(first.files.root, ["learner.steps=200"]).config.learner.steps == 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume", "nobody"], "no run called nobody under"),
        (["--resume", "demo", "demo"], "give neither a config nor --run nor --only"),
        (["--resume", "demo", "--run", "other"], "give neither a config nor --run nor --only"),
    ],
)
def test_what_cannot_be_resumed_is_reported_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
):
    monkeypatch.chdir(tmp_path)

    assert run_command(["up", *words]) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_stop_that_was_asked_before_the_run_was_opened_again_has_been_done():
    fed = Feed(SupervisorFold(Config()))
    fed.publish(OPENED).publish(ScaleRequested({"rollout": 3}))
    fed.publish(StopRequested("enough"))
    assert fed.fold.state.stopping == "enough"

    fed.publish(OPENED)
    assert fed.fold.state.stopping == ""
    assert fed.fold.state.scaling.asked["rollout"].count == 3

    fed.publish(StopRequested("enough again"))
    assert fed.fold.state.stopping == "enough again"


def test_while_a_run_rests_no_deadline_comes_nearer():
    fed = buffer_feed().issued("p000000-0", at_s=10.0).issued("p000000-1", at_s=10.0)
    assert fed.fold.next_deadline() == 110.0

    fed.publish(OPENED, at_s=5000.0)

    assert fed.fold.next_deadline() == 5100.0
    assert fed.fold.decide(5099.0) == []
    assert fed.fold.decide(5101.0) != []


def test_what_was_shown_before_a_run_was_resumed_is_no_news():
    fed = Feed(RunState("demo"))
    fed.publish(OPENED, at_s=1).publish(ActorStarted("supervisor", "supervisor-1", "here", 1), at_s=2)
    fed.publish(StopRequested(), at_s=3)
    fed.publish(ActorStopped("supervisor", "supervisor-1", "learner-1: loss is not finite"), at_s=4)
    assert (fed.fold.phase, fed.fold.failure) == ("failed", "learner-1: loss is not finite")

    fed.publish(OPENED, at_s=9).publish(ActorStarted("supervisor", "supervisor-1", "here", 2), at_s=10)
    fed.fold.report("step", 2_000_000_000, "step 1, read from another log")

    assert (fed.fold.phase, fed.fold.failure) == ("running", "")
    fed.publish(ActorStopped("supervisor", "supervisor-1", "no head", again=True), at_s=11)
    assert (fed.fold.phase, fed.fold.over) == ("starting", False)
    fed.fold.on_gone()
    assert (fed.fold.phase, fed.fold.failure) == ("failed", "no head")
    texts = [event.text for event in fed.fold.take_events()]
    assert texts == ["resumed", "supervisor-1 died: no head"]
