"""States of a run, made by hand, for tests of the doctor."""

from pathlib import Path

import msgspec
import pytest

from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from asyncrl.state.diagnose import diagnose
from asyncrl.state.records import StreamFill
from asyncrl.state.run_state import RunState
from topics.actors import (
    Activity,
    ActorStarted,
    FleetScaled,
    HeldWork,
    RunOpened,
    Vitals,
    Waiting,
)
from topics.batches import BatchPacked, BatchTrained
from topics.engines import EngineReady
from topics.table import BUILT_IN
from topics.weights import WeightsPublished

SLOW = pytest.mark.slow
NOW_S = 1000.0  # of every state made by hand
ROOT = Path(__file__).parents[2]
FLEET = {"learner": 1, "engine": 1, "prompter": 1, "buffer": 1, "rollout": 1, "reward": 1}
GROUPS = 2  # of a batch; max_lag is 2, so 6 may be open


IDLE = Activity()
IN_FUNCTION = Waiting()
AT_ENGINE = Waiting("engine", "engine-1")


class MadeState:
    """A state of a run that was well until it was told otherwise: opened at 0 s, five steps, the last at 900 s."""

    def __init__(self, last_step_s: float = 900.0) -> None:
        config = Config(buffer=msgspec.convert({"batch_groups": GROUPS}, type(Config().buffer)))
        self.state = RunState("demo")
        self.state.now_ns = int(NOW_S * 1e9)
        self.publish(RunOpened(config.learner.steps, 0, msgspec.to_builtins(config)), at_s=1.0)
        self.publish(FleetScaled(dict(FLEET)), at_s=1.0)
        for role in (*FLEET, "supervisor"):
            self.publish(ActorStarted(role, f"{role}-1", "elsewhere", 1), at_s=1.0)
            self.vitals(f"{role}-1")
        for step in range(1, 6):
            self.trained(step, at_s=last_step_s - 5 + step)
        self.packed(5)
        self.publish(EngineReady("engine-1", "http://e", 0, 5, "d", 8, update_s=0.1), at_s=last_step_s)
        self.publish(WeightsPublished(0, 5, "d", "files", "there"), at_s=last_step_s)
        self.state.streams = {
            name: StreamFill(10, 1000, 1, int((NOW_S - 1) * 1e9))
            for name in ("PROMPTS", "BATCHES", "TRAINING", "FLEET", "TRAJECTORIES", "DEAD")
        }
        self.queue("rollout", under_way=4)
        self.queue("reward")
        self.vitals("prompter-1", open_groups=3)

    def publish(self, message, *, at_s=NOW_S - 1):
        topic = BUILT_IN.topic_for(message)
        self.state.apply(topic, message, Record(topic.stream, 1, "", {}, b"", int(at_s * 1e9)))
        return self

    def vitals(self, actor_id, *held, at_s=NOW_S - 1, clock_s=None, doing=IDLE, denied="", **values):
        role = actor_id.rsplit("-", 1)[0]
        clock_s = at_s if clock_s is None else clock_s
        message = Vitals(role, actor_id, 1, clock_s, values, held=list(held), doing=doing, denied=denied)
        return self.publish(message, at_s=at_s)

    def trained(self, step, *, at_s, train_s=0.5, spread=0.3, stage="rl"):
        message = BatchTrained(step, 0, stage, {"train_s": train_s}, {}, 0, [0.0, spread], 1, 1)
        return self.publish(message, at_s=at_s)

    def packed(self, step, *, at_s=900.0):
        return self.publish(BatchPacked(step, "rl", [], 0), at_s=at_s)

    def queue(self, role, *, waiting=0, under_way=0, pulls=1):
        self.state.queues[role] = {"waiting": waiting, "under_way": under_way, "redelivered": 0, "pulls": pulls}
        return self

    def found(self):
        return [(finding.cause, finding.object) for finding in diagnose(self.state)]

    def evidence(self):
        [finding] = diagnose(self.state)
        return finding.evidence


def work(name, *, held_s=60.0, quiet_s=60.0, waiting=IN_FUNCTION, tokens=0):
    return HeldWork(name, held_s, quiet_s, waiting, tokens)
