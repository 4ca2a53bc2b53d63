"""Between the start and the first step a line every ten seconds says what the run waits for."""

import msgspec

from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from asyncrl.state.run_state import RunState
from asyncrl.state.startup import StartupLines
from topics.actors import Activity, ActorStarted, FleetScaled, RunOpened, Vitals
from topics.batches import BatchTrained
from topics.engines import EngineReady
from topics.table import BUILT_IN

FLEET = ("learner", "engine", "prompter", "buffer", "rollout", "reward")


class Starting:
    """A run of which nothing but the supervisor has started, at 0 s."""

    def __init__(self, **settings) -> None:
        self.state, self.lines = RunState("demo"), StartupLines()
        config = msgspec.convert(settings, Config)
        self.publish(RunOpened(9, config.warmup.steps, msgspec.to_builtins(config)), 0.0)
        self.publish(FleetScaled(dict.fromkeys(FLEET, 1)), 0.0)
        self.start("supervisor", 0.0)

    def publish(self, message, at_s: float) -> None:
        topic = BUILT_IN.topic_for(message)
        self.state.apply(topic, message, Record(topic.stream, 1, "", {}, b"", round(at_s * 1e9) + 1))

    def start(self, role: str, at_s: float) -> None:
        self.publish(ActorStarted(role, f"{role}-1", "elsewhere", 1), at_s)

    def does(self, role: str, kind: str, at_s: float, number: int = 0, **gauges: float) -> None:
        self.publish(Vitals(role, f"{role}-1", 1, at_s, gauges, doing=Activity(kind, number)), at_s)

    def said(self, at_s: float) -> list[str]:
        self.lines.report(self.state, round(at_s * 1e9) + 2)
        return [event.text for event in self.state.take_events() if event.text.startswith("waiting for")]


def test_each_ten_seconds_a_line_names_the_processes_and_the_work_that_are_awaited():
    run = Starting()
    assert run.said(9.0) == []
    assert run.said(10.0) == ["waiting for learner-1, engine-1, prompter-1, buffer-1, rollout-1, reward-1 to start"]
    assert run.said(19.0) == []

    for role in FLEET:
        run.start(role, 12.0)
    run.does("learner", "loading", 20.0, doing_s=8.0)
    run.does("prompter", "opening data", 20.0, doing_s=7.0)
    assert run.said(20.0) == [
        "waiting for learner-1, which loads the model (8 s); prompter-1, which opens the data (7 s); "
        "the server of engine-1, which starts (8 s)"
    ]

    run.does("learner", "awaiting batch", 29.0, number=1, doing_s=3.0)
    run.does("prompter", "", 29.0)
    run.publish(EngineReady("engine-1", "http://e", 0, 0, "d", 8), 29.0)
    run.does("buffer", "", 29.0, ready_groups=3.0)
    run.state.queues["rollout"] = {"under_way": 64}
    assert run.said(30.0) == [
        f"waiting for the first batch: 3 of {run.state.config.buffer.batch_groups} groups are complete; "
        "running: 64 trajectories"
    ]

    run.publish(BatchTrained(1, 0, "rl", {}, {}, 0, [0.0, 0.0], 8, 1), 35.0)
    assert run.said(40.0) == run.said(50.0) == []


def test_the_warm_up_waits_for_no_engine():
    run = Starting(warmup={"steps": 3})
    for role in FLEET:
        run.start(role, 1.0)
    run.does("learner", "training", 10.0, number=-2, doing_s=4.0)
    run.does("prompter", "", 10.0)

    assert run.said(10.0) == ["waiting for learner-1, which trains batch -2 (4 s)"]


def test_a_run_without_a_learner_waits_until_it_serves():
    run = Starting(only=["engine", "gateway"])
    run.state.wanted = {"engine": 1}
    run.start("engine", 1.0)

    assert run.said(11.0) == ["waiting for the server of engine-1, which starts (10 s)"]
