"""Display of a run's topics by `up` and `status`."""

import io

import pytest
from rich.console import Console

from asyncrl.bus.log import Record
from asyncrl.state.live_screen import Lines, RunView
from asyncrl.state.records import duration
from asyncrl.state.run_state import RunState
from asyncrl.state.screen import bar, render, sparkline
from asyncrl.state.status import run_status
from harness.folds import failure
from topics import actors, batches, engines, evals, trajectories, weights
from topics.actors import ActorStarted, ActorStopped, FleetScaled, RunOpened, StopRequested, Vitals
from topics.batches import BatchTrained
from topics.engines import EngineReady, EngineUpdating
from topics.evals import EvalScored
from topics.stalls import STALL_FOUND, StallFound
from topics.topic import TRAINING
from topics.weights import CheckpointSaved, TrainingFinished, WeightsPublished

START_S = 1_700_000_000


class Story:
    """A view and what it is told, by the second."""

    def __init__(self, steps: int = 0) -> None:
        self.state = RunState("demo", steps)

    def subscribe(self, at_s: float, topic, message) -> None:
        record = Record(topic.stream or TRAINING, 1, "", {}, b"", int((START_S + at_s) * 1e9))
        self.state.apply(topic, message, record)

    def started(self, at_s: float, actor_id: str, pid: int = 1) -> None:
        role = actor_id.rsplit("-", 1)[0]
        self.subscribe(at_s, actors.ACTOR_STARTED, ActorStarted(role, actor_id, "here", pid))

    def stopped(self, at_s: float, actor_id: str, reason: str = "") -> None:
        self.subscribe(at_s, actors.ACTOR_STOPPED, ActorStopped(actor_id.rsplit("-", 1)[0], actor_id, reason))

    def vitals(self, at_s: float, actor_id: str) -> None:
        message = Vitals(actor_id.rsplit("-", 1)[0], actor_id, 1, START_S + at_s, {})
        self.subscribe(at_s, actors.VITALS_TAKEN, message)

    def trained(self, at_s: float, step: int, *, reward: float = 0.5, lags=None, metrics=None) -> None:
        message = BatchTrained(
            step=step,
            lineage=0,
            stage="rl" if step > 0 else "warmup",
            metrics=metrics or {},
            lags=lags or {0: 100},
            masked=0,
            rewards=[reward, 0.0],
            trajectories=8,
            batch_sequence=step + 100,
        )
        self.subscribe(at_s, batches.BATCH_TRAINED, message)

    def published(self, at_s: float, version: int, lineage: int = 0) -> None:
        message = WeightsPublished(lineage=lineage, version=version, digest="d", store="files", location="")
        self.subscribe(at_s, weights.WEIGHTS_PUBLISHED, message)

    def texts(self) -> list[str]:
        return [event.text for event in self.state.take_events()]

    def panel(self, at_s: float, width: int = 100, height: int = 99) -> str:
        console = Console(file=io.StringIO(), width=width, height=height, color_system=None, force_terminal=True)
        console.print(render(run_status(self.state, int((START_S + at_s) * 1e9))))
        return console.file.getvalue()


def whole_run(*warm_up: int) -> Story:
    story = Story(steps=4)
    story.subscribe(0, actors.RUN_OPENED, RunOpened(steps=4, warmup_steps=2, settings={}))
    story.started(0, "supervisor-1")
    story.subscribe(0, actors.FLEET_SCALED, FleetScaled({"rollout": 2, "learner": 1}))
    for name in ("rollout-1", "rollout-2", "learner-1"):
        story.started(1, name)
    for step in (*warm_up, 0):
        story.trained(3 + step, step)
    story.published(3, 0)
    story.subscribe(4, engines.ENGINE_READY, EngineReady("engine-1", "http://h:1", 0, 0, "d", 8))
    scored = EvalScored("e000000", 0, {0: 9}, 0.25, 16, 0, 0.1)
    story.subscribe(5, evals.EVAL_SCORED, scored)
    story.trained(6, 1, reward=0.25)
    story.trained(8, 2, reward=0.5, lags={0: 100, 1: 300})
    story.published(8, 2)
    story.subscribe(
        8, weights.CHECKPOINT_SAVED, CheckpointSaved(lineage=0, step=2, digest="d", path="p", batch_sequence=1)
    )
    return story


def test_a_run_becomes_one_line_per_event():
    assert whole_run(-1).texts() == [
        "started",
        "step 1 of 2 of warm-up",
        "version 0 published after 2 steps of warm-up",
        "evaluation of version 0: 0.250 on 16 prompts",
        "step 1 of 4  reward 0.250  lag 0.00",
        "step 2 of 4  reward 0.500  lag 0.60  200 tokens/s",
    ]


def test_the_panel_shows_step_reward_lag_speed_and_fleet():
    panel = whole_run().panel(10)

    for words in (
        "demo",
        "2 of 4   version 2   checkpoint 2",
        "0.500",
        "v0 0.250",
        "0.60 mean",
        "40 %",
        "60 %",
        "200 tokens/s trained",
        "4.00 trajectories/s",
        "● engine-1 v0",
        "running · 0:10",
    ):
        assert words in panel
    assert max(map(len, panel.splitlines())) <= 100
    narrow = whole_run().panel(10, width=60)
    assert all(f" {label}  " in narrow for label in ("step", "reward", "accuracy", "lag", "speed", "engines"))
    for words in ("2 of 4", "checkpoint 2", "200 tokens/s trained", "4.00 trajectories/s"):
        assert words in narrow  # what does not fit is on the next line


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (60, 12)])
def test_the_panel_leaves_out_what_a_low_terminal_has_no_room_for(width: int, height: int):
    story = whole_run()
    story.stopped(9, "rollout-2")

    panel = story.panel(10, width, height)

    assert len(panel.splitlines()) < height
    for words in ("2 of 4", "0.500", "v0 0.250", "0.60 mean", "200 tokens/s trained", "1 of 2", "running · 0:10"):
        assert words in panel
    assert "supervisor" in story.panel(10, width, 50)  # a row for each role, where there is room
    assert "no step yet" in Story().panel(0, width, height)


def test_the_panel_shows_the_answers_and_the_seconds_of_the_newest_batch_in_80_cells():
    story = whole_run()
    story.trained(9, 3, metrics={"train_s": 1.94, "wait_s": 0.4, "loss": 0.1})
    story.state.figures = {
        "response_tokens_mean": 214.4,
        "truncated_share": 0.03,
        "flat_groups_share": 0.125,
        "issue_to_grade_s_mean": 12.34,
        "reward/format": 0.98,
    }

    panel = story.panel(10, width=80)

    assert " answers  214 tokens mean   3 % truncated   12 % flat groups " in panel
    assert " metrics  0.980 format " in panel
    assert " learner  1.94 s training   0.40 s waiting   12.3 s from issue to grade " in panel


def test_a_run_that_is_over_lacks_no_actors():
    story = whole_run()
    story.stopped(11, "rollout-1")
    assert "1 of 2" in story.panel(12)

    story.subscribe(12, actors.STOP_REQUESTED, StopRequested("asyncrl down"))
    story.stopped(13, "supervisor-1")

    assert story.state.over
    assert "rollout" not in story.panel(14)


def test_lines_show_each_event_once_and_of_steps_the_newest(capsys):
    story, lines, view = whole_run(), Lines(), RunView()

    def publish(at_s: float) -> None:
        view.take(run_status(story.state, int((START_S + at_s) * 1e9), story.state.take_events()))
        lines.refresh(view)

    publish(8.5)  # of two steps read at once, the newer is shown
    publish(9)
    shown = capsys.readouterr().out.splitlines()
    story.trained(9, 3)
    publish(10)

    assert shown == [
        "  0:00  started",
        "  0:03  version 0 published after 2 steps of warm-up",
        "  0:05  evaluation of version 0: 0.250 on 16 prompts",
        "  0:08  step 2 of 4  reward 0.500  lag 0.60  200 tokens/s",
    ]
    assert capsys.readouterr().out.startswith("  0:09  step 3 of 4")


def test_an_actor_that_dies_is_reported_with_its_last_error_and_counted_when_it_comes_back():
    story = whole_run()
    story.state.take_events()

    story.stopped(11, "rollout-1", "BusGone: no acknowledgement")
    story.started(12, "rollout-1", pid=2)
    story.started(13, "rollout-2", pid=3)  # killed: it reported no stop

    assert story.texts() == [
        "rollout-1 died: BusGone: no acknowledgement",
        "rollout-1 started again",
        "rollout-2 died without an error message",
        "rollout-2 started again",
    ]
    assert sum(actor.restarts for actor in story.state.actors.values()) == 2
    assert "2 restarts" in story.panel(13)


def test_an_actor_that_is_scaled_away_and_back_did_not_die():
    story = whole_run()
    story.state.take_events()

    story.stopped(11, "rollout-2")
    story.started(12, "rollout-2", pid=3)

    assert story.texts() == []
    assert sum(actor.restarts for actor in story.state.actors.values()) == 0


def test_a_worker_that_died_while_it_was_scaled_away_is_not_shown():
    story = whole_run()
    story.vitals(11, "rollout-2")
    story.subscribe(12, actors.FLEET_SCALED, FleetScaled({"rollout": 1}))
    story.vitals(13, "rollout-1")
    assert "2 of 1" in story.panel(13)  # it finishes what it has

    story.vitals(24, "rollout-1")  # and it was killed meanwhile

    rollout = [actor for actor in run_status(story.state, 0).actors if actor.role == "rollout"]
    assert [actor.actor_id for actor in rollout] == ["rollout-1"]
    assert "2 of 1" not in story.panel(24)

    story.started(25, "rollout-2", pid=3)  # before it is wanted again, as its logs may be read
    story.stopped(26, "rollout-2", "RuntimeError: it dies")
    assert "it dies" not in story.panel(26)


def test_missing_actors_are_shown_against_those_wanted():
    story = whole_run()
    story.stopped(11, "rollout-2")

    assert "1 of 2" in story.panel(12)


def test_sampled_tokens_per_second_come_from_two_vital_signs():
    story = whole_run()
    for at_s, tokens in ((10, 1000), (12, 5000)):
        vitals = Vitals("rollout", "rollout-1", 1, START_S + at_s, {"tokens": tokens, "cpu_share": 0.5})
        story.subscribe(at_s, actors.VITALS_TAKEN, vitals)

    assert story.state.rates()["sampled_tokens"] == 2000
    assert "silent" not in story.panel(13)
    assert "1 silent" in story.panel(30)


def test_neither_the_time_a_run_stood_still_nor_what_it_had_sampled_before_is_in_a_rate_after_it_was_resumed():
    story = whole_run()
    settings = {"buffer": {"max_lag": 2}}
    story.subscribe(1000, actors.RUN_OPENED, RunOpened(steps=40, warmup_steps=2, settings=settings))
    for step in (3, 4, 5):  # as many batches of groups may have been open
        story.trained(1010 + step / 100, step)
    assert "trained_tokens" not in story.state.rates()

    for step in range(6, 40):
        story.trained(1010 + step, step)
        assert story.state.rates().get("steps", 1.0) == pytest.approx(1.0)
    assert story.state.rates()["trained_tokens"] == pytest.approx(100.0)


def test_a_checkpoint_of_the_warm_up_is_shown_by_the_steps_of_the_warm_up():
    story = Story()
    story.subscribe(0, actors.RUN_OPENED, RunOpened(steps=4, warmup_steps=500, settings={}))
    story.trained(1, -299)
    saved = CheckpointSaved(lineage=0, step=-300, digest="d", path="p", batch_sequence=1)
    story.subscribe(1, weights.CHECKPOINT_SAVED, saved)

    assert "201 of 500   of warm-up   checkpoint 200 of warm-up" in story.panel(2)


def test_a_run_that_only_serves_waits_for_no_step():
    story = Story()
    assert "no step yet" in story.panel(1)

    story.subscribe(1, actors.FLEET_SCALED, FleetScaled({"learner": 0, "engine": 1}))
    story.started(1, "engine-1")
    assert "engine" in story.panel(2) and "no step yet" not in story.panel(2)


def test_what_an_actor_starts_anew_is_reported_and_counted_though_its_process_lives():
    story = whole_run()
    story.texts()
    lost = "its trainer group was lost: rank 1 ended: killed by SIGKILL"
    story.subscribe(9, actors.ACTOR_STARTED, ActorStarted("learner", "learner-1", "here", 1, lost))

    assert story.texts() == [f"learner-1: {lost}", "learner-1 started again"]
    assert "1 restart" in story.panel(10)


def test_an_updating_engine_is_shown_as_such():
    story = whole_run()
    story.subscribe(9, engines.ENGINE_UPDATING, EngineUpdating("engine-1", 0, 2))

    story.subscribe(9, weights.WEIGHTS_REFUSED, weights.WeightsRefused("engine-2", 0, 2, 7, "torn"))
    assert all(shown in story.panel(10) for shown in ("engine-1 v2 updating", "engine-2 updating"))


def test_failures_are_reported_at_the_first_the_tenth_and_the_hundredth():
    story = Story()
    for number in range(120):
        failed = failure(f"p{number:06}-0", "reward", detail="time limit")
        story.subscribe(number, trajectories.TRAJECTORY_FAILED, failed)

    counts = ((0, "1 trajectory"), (9, "10 trajectories"), (99, "100 trajectories"))
    assert story.texts() == [f"{count} failed; last: p{last:06}-0 reward: time limit" for last, count in counts]
    assert "▲ 120 trajectories failed; last: p000119-0 reward: time limit" in story.panel(130)


def test_a_traceback_takes_one_line_that_names_where_the_rest_is():
    story = whole_run()
    story.state.take_events()
    trace = 'File "tools.py", line 7, in rollout\n    raise ValueError(row)\nValueError: no such tool\n'
    failed = failure("p000001-0", detail=trace)
    stall = StallFound("actor dying", "rollout-1", f"started 3 times in the last minute; last error: {trace}", "")

    story.subscribe(11, trajectories.TRAJECTORY_FAILED, failed)
    story.subscribe(12, STALL_FOUND, stall)
    story.stopped(13, "rollout-1", trace)

    place = 'File "tools.py", line 7, in rollout ... ValueError: no such tool'
    assert story.texts() == [
        f"1 trajectory failed; last: p000001-0 rollout: {place} (more: asyncrl explain p000001-0)",
        "actor dying: rollout-1: started 3 times in the last minute; last error: "
        f"{place} (more: asyncrl logs rollout-1)",
        f"rollout-1 died: {place} (more: asyncrl logs rollout-1)",
    ]


def test_the_supervisors_last_error_is_why_a_run_failed():
    story = whole_run()
    story.stopped(11, "learner-1", "loss is not finite")
    story.stopped(12, "supervisor-1", "learner-1: loss is not finite")

    assert story.state.phase == "failed"
    assert story.state.failure == "learner-1: loss is not finite"


def test_a_run_ends_finished_or_stopped():
    finished, stopped = whole_run(), whole_run()
    finished.subscribe(11, weights.TRAINING_FINISHED, TrainingFinished(step=4, reason="steps", exported="/model"))
    stopped.subscribe(11, actors.STOP_REQUESTED, StopRequested("asyncrl down"))
    for story in (finished, stopped):
        story.stopped(12, "supervisor-1")

    assert (finished.state.phase, stopped.state.phase) == ("finished", "stopped")


def test_a_run_of_which_no_process_is_left_has_crashed_unless_its_logs_hold_its_end():
    story, ended = whole_run(), whole_run()
    ended.stopped(12, "supervisor-1")
    for each in (story, ended):
        each.state.on_gone()

    assert (story.state.phase, ended.state.phase) == ("crashed", "stopped")
    assert "continue with `asyncrl up --resume " in story.state.failure
    assert not any(actor.live for actor in story.state.actors.values())


def test_an_end_that_is_read_before_the_end_of_training_is_the_end_all_the_same():
    story, failed = whole_run(), whole_run()
    story.stopped(12, "supervisor-1")
    failed.stopped(12, "supervisor-1", "the disk is full")
    for each in (story, failed):
        each.subscribe(11, weights.TRAINING_FINISHED, TrainingFinished(step=4, reason="steps", exported="/model"))

    assert (story.state.phase, failed.state.phase) == ("finished", "failed")


def test_a_new_line_of_weights_is_a_warning():
    story = whole_run()
    story.state.take_events()
    story.published(9, 2, lineage=1)

    assert story.state.take_events()[0].kind == "warning"


def test_curves_and_bars_stay_in_their_width():
    assert sparkline([0.0, 1.0], 40) == "▁█"
    assert len(sparkline([0.5] * 1000, 40)) == 40
    assert sparkline([], 40) == ""
    assert (bar(0, 8), bar(0.5, 8), bar(2, 8)) == ("", "████", "████████")
    assert (duration(42), duration(3723)) == ("0:42", "1:02:03")
