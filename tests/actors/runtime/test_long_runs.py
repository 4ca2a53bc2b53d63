"""The state of learner, supervisor and recorder stays small however long a run is, and a snapshot holds all of it."""

import itertools
import random
from functools import partial

import msgspec
import pytest

from actors.learner.fold import LearnerFold
from actors.recorder.fold import RecorderFold
from actors.supervisor.fold import SupervisorFold
from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from harness.folds import Feed
from topics.actors import ActorStarted, ActorStopped, ScaleRequested
from topics.engines import EngineReady, EngineUpdating
from topics.evals import EvalRequested, EvalScored
from topics.ids import EVALUATION, prompt_name
from topics.streams import CheckpointRequested
from topics.trajectories import (
    TRAJECTORY_GENERATED,
    TRAJECTORY_PROGRESSED,
    TrajectoryGeneratedHeaders,
    TrajectoryProgressedHeaders,
)
from topics.weights import (
    CHECKPOINT_LOST,
    CheckpointLost,
    CheckpointSaved,
    WeightsPublished,
)
from topics.wire import decode, encode

CONFIG = msgspec.convert({"rollout": {"group_size": 2}, "buffer": {"batch_groups": 4}}, Config)
FOLDS = {
    "learner": partial(LearnerFold, CONFIG),
    "supervisor": partial(SupervisorFold, CONFIG),
    "recorder": RecorderFold,
}
GROUPS = 4


class Log(Feed):
    """Published messages, to be fed to folds in any order of the logs."""

    def __init__(self):
        super().__init__(self)
        self.messages = []

    def apply(self, topic, message, record):
        self.messages.append((topic, message, record))


def story(steps, chance):
    """The logs of a run: evaluations, actors that die, engines that follow, a checkpoint every ten steps."""
    log, saved, numbers = Log(), [], itertools.count()
    for step in range(1, steps + 1):
        names = [f"p{next(numbers):06d}" for _ in range(GROUPS)]
        log.packed(step, *names).trained(step)
        if chance.random() < 0.1:
            log.dropped(f"p{next(numbers):06d}")
        log.publish(WeightsPublished(0, step, f"d{step}", "files", f"/w/lineage0-v{step:06d}-d"))
        log.publish(EngineUpdating("engine-1", 0, step))
        log.publish(EngineReady("engine-1", "here", 0, step, "d", 1))
        if step % 10 == 0:
            saved.append(CheckpointSaved(0, step, f"d{step}", f"/c/step{step:06d}-lineage0-d", step))
            log.publish(saved[-1])
        elif step % 10 == 5 and saved and chance.random() < 0.1:
            lost = saved.pop()
            log.publish(CheckpointLost(0, lost.step, lost.path, "it is torn"))
        if step % 7 == 0:
            name = prompt_name(EVALUATION, step // 7 - 1)
            log.publish(EvalRequested(name, step, 3, 0.0))
            log.publish(EvalScored(name, step, {step: 3}, 0.5, 3, 0, 1.0))
        if chance.random() < 0.2:
            log.publish(ActorStopped("rollout", "rollout-1", "killed"))
            log.publish(ActorStarted("rollout", "rollout-1", "here", step))
            log.publish(ScaleRequested({"rollout": chance.randint(1, 3)}))
            log.publish(CheckpointRequested(step, "full"))
    return log.messages


def in_any_order(output, chance):
    """The same messages in the order of their logs, the logs in any order, none far ahead of another."""
    logs = {}
    for number, entry in enumerate(output):
        logs.setdefault(entry[0].stream.name, []).append((number, entry))
    ahead = {name: chance.random() * 40 for name in logs}
    entries = [(number + ahead[name], name, entry) for name, log in logs.items() for number, entry in log]
    return [entry for *_, entry in sorted(entries, key=lambda entry: entry[:2])]


def folded(make, output, cut=None):
    fold = make()
    for number, entry in enumerate(output):
        if number == cut:
            before, fold = fold, make()
            fold.state = decode(type(before.state), encode(before.state))
        fold.apply(*entry)
    return fold


@pytest.mark.parametrize("role", FOLDS)
@pytest.mark.parametrize("seed", range(5))
def test_a_fold_taken_up_from_a_snapshot_is_the_fold_of_everything(role, seed):
    chance = random.Random(seed)
    output = in_any_order(story(120, chance), chance)

    whole, rest = [folded(FOLDS[role], output, cut) for cut in (None, chance.randrange(1, len(output)))]

    assert rest.state == whole.state


@pytest.mark.parametrize("role", FOLDS)
def test_what_is_known_of_a_long_run_stays_small(role):
    sizes = []
    for steps in (200, 3000):
        fold = folded(FOLDS[role], story(steps, random.Random(1)))
        if role == "supervisor":
            fold.versions()  # as its trimmer does every second
        sizes.append(len(encode(fold.state)))

    assert sizes[1] < 2 * sizes[0]


def test_a_learner_remembers_what_may_be_trained_again():
    fold = folded(FOLDS["learner"], [entry for entry in story(45, random.Random(0)) if entry[0] is not CHECKPOINT_LOST])

    assert [saved.step for saved in fold.state.checkpoints] == [30, 40]
    assert sorted(fold.state.batches) == [*range(31, 46)]
    assert sorted(fold.state.published) == [*range(30, 46)]
    assert fold.at_hand(45) is not None
    assert fold.at_hand(43) is None
    assert fold.state.asked_for == {"": 42}


def test_what_the_payload_stream_holds_is_read_from_there_and_not_from_a_snapshot():
    """A trajectory of a group that ended before the snapshot is needed by nobody, one of an open group is."""

    def stored(topic, headers, at):
        subject = f"asyncrl.run.{topic.name}.{headers.trajectory_id}"
        return topic, headers, Record(topic.stream, at, subject, {}, b"", 0)

    before = Log().dropped("p000001").messages
    first = folded(FOLDS["supervisor"], before)
    second = FOLDS["supervisor"]()
    second.state = decode(type(first.state), encode(first.state))
    second.apply(*stored(TRAJECTORY_GENERATED, TrajectoryGeneratedHeaders("p000001-0", 0, 1, ""), 5))
    second.apply(*stored(TRAJECTORY_PROGRESSED, TrajectoryProgressedHeaders("p000002-0", 0, 1, 0, "log"), 7))

    assert second.open == ["p000002-0"]
    assert second.floor(100) == 7
