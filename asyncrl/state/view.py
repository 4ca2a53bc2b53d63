"""The view of a run: a fold of its topics that `up` and `status` show."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from asyncrl.bus.log import Record
from asyncrl.run.connect import SUPERVISOR
from asyncrl.state.events import Event, EventKind, Trouble, one_line
from topics.actors import (
    ACTOR_STARTED,
    ACTOR_STOPPED,
    DEAD_LETTER,
    FLEET_SCALED,
    RUN_OPENED,
    STOP_REQUESTED,
    VITALS_TAKEN,
    Vitals,
)
from topics.batches import BATCH_TRAINED, BatchTrained
from topics.engines import ENGINE_GONE, ENGINE_READY, ENGINE_UPDATING
from topics.evals import EVAL_SCORED, EvalScored
from topics.stalls import STALL_ENDED, STALL_FOUND, StallFound
from topics.streams import ADMISSION_PAUSED, ADMISSION_RESUMED, STREAM_TRIMMED
from topics.topic import Topic
from topics.trajectories import TRAJECTORY_FAILED
from topics.weights import CHECKPOINT_SAVED, TRAINING_FINISHED, WEIGHTS_PUBLISHED

FOLLOWED = (
    BATCH_TRAINED,
    WEIGHTS_PUBLISHED,
    CHECKPOINT_SAVED,
    TRAINING_FINISHED,
    EVAL_SCORED,
    ENGINE_UPDATING,
    ENGINE_READY,
    ENGINE_GONE,
    TRAJECTORY_FAILED,
    DEAD_LETTER,
    RUN_OPENED,
    ACTOR_STARTED,
    ACTOR_STOPPED,
    STOP_REQUESTED,
    FLEET_SCALED,
    STALL_FOUND,
    STALL_ENDED,
    STREAM_TRIMMED,
    ADMISSION_PAUSED,
    ADMISSION_RESUMED,
    VITALS_TAKEN,
)
_SILENT_NS = 6 * 10**9  # three vital signs
RECENT_STEPS = 20  # window of lag and rates
RunState: TypeAlias = Literal["starting", "running", "stopping", "finished", "stopped", "failed", "crashed"]


class Step(NamedTuple):
    """One optimiser step."""

    step: int
    stage: str
    time_ns: int
    reward: float
    lags: dict[int, int]  # trained tokens per lag
    trajectories: int


@dataclass
class Actor:
    """One process of a role."""

    actor_id: str
    role: str
    host: str
    pid: int
    began_ns: int = 0  # server's clock when it was published
    live: bool = True
    restarts: int = 0
    last_error: str = ""
    vitals: dict[str, float] = field(default_factory=dict)
    seen_ns: int = 0  # server's clock at its last vital signs
    tokens_per_s: float = 0.0  # sampled, between its last two vital signs
    _at_s: float = 0.0

    def take_vitals(self, message: Vitals, time_ns: int) -> None:
        """Keep its newest vital signs, and the rate since the ones before."""
        elapsed = message.at_s - self._at_s
        gained = message.values.get("tokens", 0.0) - self.vitals.get("tokens", 0.0)
        if self._at_s and elapsed > 0 and message.pid == self.pid:
            self.tokens_per_s = max(0.0, gained) / elapsed
        self.vitals, self._at_s, self.seen_ns = message.values, message.at_s, time_ns


class Engine(NamedTuple):
    """One inference server."""

    engine_id: str
    state: Literal["ready", "updating", "gone"]
    version: int
    update_s: float = 0.0


class Filled(NamedTuple):
    """The fill level of a stream."""

    bytes: int
    max_bytes: int

    @property
    def share(self) -> float:
        """0 to 1."""
        return self.bytes / self.max_bytes


class RunView:
    """The state of a run from its topics; the watcher polls the server for `queues`, `streams` and `figures`."""

    def __init__(self, run: str, steps: int = 0) -> None:
        self.run = run
        self.total = steps  # RL steps of the run; 0: not known
        self.events: list[Event] = []  # not yet shown
        self.first_ns = 0
        self.last_ns = 0
        self.state: RunState = "starting"
        self.failure = ""  # last output of a run that failed
        self.recent: list[Step] = []  # newest last; no more than RECENT_STEPS + 1
        self.trained: BatchTrained | None = None  # the newest
        self.rewards: list[float] = []  # mean of each RL step
        self.warmup_steps = 0
        self.version: int | None = None
        self.lineage = 0
        self.checkpoint: int | None = None  # step of the newest
        self.exported = ""
        self._finished_at: int | None = None  # step at which training was reported finished
        self.evals: list[EvalScored] = []
        self.engines: dict[str, Engine] = {}
        self.actors: dict[str, Actor] = {}
        self.wanted: dict[str, int] = {}
        self.failed = Trouble("trajectories failed")
        self.dead = Trouble("messages rejected")
        self.stalls: dict[tuple[str, str], StallFound] = {}  # the open causes that keep the run from advancing
        self.queues: dict[str, dict[str, int]] = {}
        self.streams: dict[str, Filled] = {}  # payload streams, by name
        self.figures: dict[str, float] = {}  # of the trajectories of the newest batch that was trained
        self.trimmed_bytes = 0  # of payload streams, since the beginning
        self.trims = 0
        self.paused = ""  # why admission is paused
        self._heard_ns = 0  # server's clock at the newest vital signs of any actor
        self._asked_to_stop = False
        self._opened_ns = 0  # server's clock when `up` began, or went on

    def apply(self, topic: Topic[Any], message: Any, record: Record) -> None:
        """Fold one message in."""
        if topic is VITALS_TAKEN:
            actor = self.actors.get(message.actor_id)
            if actor is not None:
                actor.take_vitals(message, record.time_ns)
                self._heard_ns = max(self._heard_ns, record.time_ns)
            return
        self.first_ns = min(self.first_ns or record.time_ns, record.time_ns)
        self.last_ns = max(self.last_ns, record.time_ns)
        if topic is BATCH_TRAINED:
            self._on_trained(message, record.time_ns)
        elif topic is WEIGHTS_PUBLISHED:
            self._on_published(message.lineage, message.version, record.time_ns)
        elif topic is CHECKPOINT_SAVED:
            self.checkpoint = message.step
        elif topic is EVAL_SCORED:
            self.evals.append(message)
            failed = f", {message.failed} without a grade" if message.failed else ""
            text = (
                f"evaluation of version {message.version}: {message.accuracy:.3f} on {message.prompts} prompts{failed}"
            )
            self.report("news", record.time_ns, text)
        elif topic is ENGINE_UPDATING:
            self.engines[message.engine_id] = Engine(message.engine_id, "updating", message.version)
        elif topic is ENGINE_READY:
            self.engines[message.engine_id] = Engine(message.engine_id, "ready", message.version, message.update_s)
        elif topic is ENGINE_GONE:
            self.engines.pop(message.engine_id, None)
        elif topic is TRAJECTORY_FAILED:
            words = one_line(
                f"{message.trajectory_id} {message.reason}: {message.detail}", f"explain {message.trajectory_id}"
            )
            self._count(self.failed, words, record.time_ns)
        elif topic is DEAD_LETTER:
            words = f"{message.topic}, number {message.sequence} of {message.stream}: {message.reason}"
            self._count(self.dead, words, record.time_ns)
        elif topic is STREAM_TRIMMED:
            self.trims += 1
            self.trimmed_bytes += message.bytes
        elif topic is ADMISSION_PAUSED or topic is ADMISSION_RESUMED:
            self.paused = message.reason if topic is ADMISSION_PAUSED else ""
            kind: EventKind = "warning" if self.paused else "news"
            self.report(kind, record.time_ns, f"{topic.name.replace('.', ' ')}: {message.reason}")
        elif topic is RUN_OPENED:
            self._on_opened(message.steps, record.time_ns)
        else:
            self._on_start_or_stop(topic, message, record.time_ns)

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in the order they were read."""
        events, self.events = self.events, []
        return events

    @property
    def over(self) -> bool:
        """Return whether nothing more will come."""
        return self.state in ("finished", "stopped", "failed", "crashed")

    @property
    def step(self) -> Step | None:
        """The newest optimiser step."""
        return self.recent[-1] if self.recent else None

    @property
    def lags(self) -> dict[int, int]:
        """Trained tokens per lag over the recent RL steps."""
        found: dict[int, int] = {}
        for step in self.recent[-RECENT_STEPS:]:
            for lag, tokens in step.lags.items():
                if step.stage == "rl":
                    found[lag] = found.get(lag, 0) + tokens
        return dict(sorted(found.items()))

    @property
    def mean_lag(self) -> float | None:
        """Mean lag of the tokens trained in recent RL steps, versions."""
        lags = self.lags
        tokens = sum(lags.values())
        return sum(lag * count for lag, count in lags.items()) / tokens if tokens else None

    @property
    def restarts(self) -> int:
        """Return how often an actor was started again."""
        return sum(actor.restarts for actor in self.actors.values())

    @property
    def fleet(self) -> list[Actor]:
        """Actors that are wanted, and others as long as they live: one that dies then is never started again."""
        wanted = {f"{role}-{number}" for role, count in self.wanted.items() for number in range(1, count + 1)}
        silent_ns = self._heard_ns - _SILENT_NS
        return [
            actor
            for actor in self.actors.values()
            if actor.role not in self.wanted
            or actor.actor_id in wanted
            or (actor.live and max(actor.began_ns, actor.seen_ns) > silent_ns)
        ]

    def rates(self) -> dict[str, float]:
        """Steps, trajectories and tokens trained, and tokens sampled, per second; what is not known yet is left out."""
        found: dict[str, float] = {}
        sampled = sum(actor.tokens_per_s for actor in self.actors.values() if actor.live)
        if sampled:
            found["sampled_tokens"] = sampled
        stage = self.step.stage if self.step is not None else None
        steps = [step for step in self.recent if step.stage == stage and step.time_ns >= self._opened_ns]
        seconds = (steps[-1].time_ns - steps[0].time_ns) / 1e9 if steps else 0.0
        if seconds > 0:
            found["trained_tokens"] = sum(sum(step.lags.values()) for step in steps[1:]) / seconds
            found["trajectories"] = sum(step.trajectories for step in steps[1:]) / seconds
            found["steps"] = (len(steps) - 1) / seconds
        return found

    @property
    def metrics(self) -> dict[str, float]:
        """Of the newest step: of the learner, and of the trajectories of its batch."""
        return (self.trained.metrics if self.trained is not None else {}) | self.figures

    def gauge(self, role: str, name: str) -> float | None:
        """A gauge among the vital signs of a keeper."""
        actor = self.actors.get(f"{role}-1")
        return actor.vitals.get(name) if actor is not None else None

    def report(self, kind: EventKind, time_ns: int, text: str) -> None:
        """Note something worth a line; what happened before the run was resumed is not."""
        if time_ns >= self._opened_ns:
            self.events.append(Event(kind, time_ns, text))

    def _count(self, trouble: Trouble, words: str, time_ns: int) -> None:
        if trouble.add(words):
            self.report("warning", time_ns, str(trouble))

    def _on_opened(self, steps: int, time_ns: int) -> None:
        """A run begins or goes on: what was asked and how it ended before is past."""
        resumed = self._opened_ns > 0
        self.total, self._opened_ns = steps, time_ns
        self.state, self.failure, self._asked_to_stop = "starting", "", False
        self.stalls.clear()
        self.events = [event for event in self.events if event.time_ns >= time_ns]
        if resumed:
            self.report("news", time_ns, "resumed")

    def _on_trained(self, message: BatchTrained, time_ns: int) -> None:
        if not self.recent and message.stage == "warmup":
            self.warmup_steps = 1 - message.step  # warm-up batches carry the steps 1 - warmup_steps .. 0
        step = Step(message.step, message.stage, time_ns, message.rewards[0], message.lags, message.trajectories)
        self.trained = message
        self.recent = [*self.recent[-RECENT_STEPS:], step]
        if message.stage == "warmup":
            return
        self.rewards.append(step.reward)
        total = f" of {self.total}" if self.total else ""
        lag = "" if self.mean_lag is None else f"  lag {self.mean_lag:.2f}"
        rate = self.rates().get("trained_tokens")
        speed = "" if rate is None else f"  {rate:,.0f} tokens/s"
        self.report("step", time_ns, f"step {message.step}{total}  reward {step.reward:.3f}{lag}{speed}")

    def _on_published(self, lineage: int, version: int, time_ns: int) -> None:
        if lineage > self.lineage:
            self.report(
                "warning", time_ns, f"line {lineage} begins: the learner went on with other weights than it published"
            )
        if self.version is None:
            warmed = f" after {self.warmup_steps} steps of warm-up" if self.warmup_steps else ""
            self.report("news", time_ns, f"version {version} published{warmed}")
        self.lineage, self.version = lineage, version

    def _on_start_or_stop(self, topic: Topic[Any], message: Any, time_ns: int) -> None:
        if topic is ACTOR_STARTED:
            self._on_started(message, time_ns)
        elif topic is ACTOR_STOPPED:
            self._on_stopped(message, time_ns)
        elif topic is FLEET_SCALED:
            if self.wanted:
                fleet = ", ".join(f"{role} {count}" for role, count in message.wanted.items())
                self.report("news", time_ns, f"fleet scaled: {fleet}")
            self.wanted.update(message.wanted)
        elif topic is STALL_FOUND and time_ns >= self._opened_ns:
            self.stalls[message.cause, message.object] = message
            words = one_line(f"{message.cause}: {message.object}: {message.evidence}", f"logs {message.object}")
            self.report("warning", time_ns, words)
        elif topic is STALL_ENDED:
            self.stalls.pop((message.cause, message.object), None)
            self.report("news", time_ns, f"over: {message.cause}: {message.object}")
        elif topic is STOP_REQUESTED:
            self.state, self._asked_to_stop = "stopping", True
            self.report("news", time_ns, f"asked to stop{': ' + message.reason if message.reason else ''}")
        elif topic is TRAINING_FINISHED:
            self.exported, self._finished_at = message.exported, message.step
            if message.step >= self.total:  # else the run was made longer since
                self._on_all_trained()
            where = f"; model in {message.exported}" if message.exported else ""
            self.report("news", time_ns, f"training finished at step {message.step}{where}")

    def on_gone(self) -> None:
        """Note that no process of the run is left, whatever its logs hold."""
        if not self.over:
            self.state, self.failure = "crashed", f"it was killed; go on with `asyncrl up --resume {self.run}`"
        for actor in self.actors.values():
            actor.live = False

    def _on_all_trained(self) -> None:
        """Training is over. Logs are read beside each other: the end of the run may be known already."""
        if self.state in ("starting", "running"):
            self.state = "stopping"
        elif self.state == "stopped" and not self._asked_to_stop:
            self.state = "finished"

    def _on_started(self, message: Any, time_ns: int) -> None:
        before = self.actors.get(message.actor_id)
        actor = Actor(message.actor_id, message.role, message.host, message.pid, time_ns)
        self.actors[message.actor_id] = actor
        if message.actor_id == SUPERVISOR:
            self.state, self.failure = "running", ""
            if before is None:
                self.report("news", time_ns, "started")
        if before is None or (not before.live and not before.last_error):
            return
        actor.restarts = before.restarts + 1
        if before.live:
            self.report("warning", time_ns, f"{actor.actor_id} died without an error message")
        self.report("news", time_ns, f"{actor.actor_id} started again")

    def _on_stopped(self, message: Any, time_ns: int) -> None:
        actor = self.actors.setdefault(message.actor_id, Actor(message.actor_id, message.role, "", 0))
        actor.live, actor.last_error, actor.tokens_per_s = False, message.reason, 0.0
        if message.actor_id == SUPERVISOR:
            self.failure = message.reason
            trained = self._finished_at is not None and self._finished_at >= self.total
            finished = trained and not self._asked_to_stop
            self.state = "failed" if message.reason else "finished" if finished else "stopped"
            self.report("warning" if message.reason else "news", time_ns, self.state)
        elif message.reason:
            words = one_line(f"{message.actor_id} died: {message.reason}", f"logs {message.actor_id}")
            self.report("warning", time_ns, words)
