"""The state of a run: one fold of its messages, for commands, the doctor and exporters."""

from __future__ import annotations

from collections import deque
from typing import Literal, TypeAlias

import msgspec

from asyncrl.bus.log import Record
from asyncrl.config.renamed import read_settings
from asyncrl.config.settings import Config
from asyncrl.config.tasks import Begun, first_stages
from asyncrl.run.connect import SUPERVISOR
from asyncrl.state.records import (
    LISTENS,
    Actor,
    Disk,
    Event,
    EventKind,
    Letter,
    Step,
    StreamFill,
    Trouble,
    counted,
    evaluation_text,
    one_line,
)
from asyncrl.state.stored_profiles import StoredProfiles
from topics.actors import (
    ActorLeaving,
    ActorStarted,
    ActorStopped,
    DeadLetter,
    FleetScaled,
    RunOpened,
    StopRequested,
    Vitals,
)
from topics.batches import BatchPackedHeaders, BatchTrained
from topics.evals import EvalScored
from topics.groups import GroupDropped
from topics.ids import TASK, prompt_name
from topics.stages import StageBegan
from topics.stalls import StallEnded, StallFound
from topics.streams import AdmissionPaused, AdmissionResumed, StreamTrimmed
from topics.table import BUILT_IN
from topics.topic import Retention, Topic
from topics.trajectories import TrajectoryFailed
from topics.weights import CheckpointSaved, TrainingFinished, WeightsPublished, WeightsRejected, WeightsUnchanged
from topics.wire import Headers, Message

Phase: TypeAlias = Literal["starting", "running", "stopping", "finished", "stopped", "failed", "crashed"]

RECENT_STEPS = 20  # window of lag and rates
_WASTE = 0.01  # share of tokens that were too old, which a line about a step names
_LETTERS = 5
_EVENTS = 1024  # that were not taken yet; older ones are forgotten


class RunState(StoredProfiles):
    """Knowledge of a run from its topics. Its driver counts `queues` and `streams`, which no topic holds."""

    def __init__(self, run: str, steps: int = 0) -> None:
        super().__init__()
        self.run = run
        self.tables = BUILT_IN  # of the run
        self.total = steps  # RL steps of the run; 0: not known
        self.config = Config()
        self.phase: Phase = "starting"
        self.failure = ""  # last output of a run that failed
        self.now_ns = 0  # server's clock when this was looked at; 0 while it is followed
        self.first_ns = self.last_ns = 0  # first and newest message
        self.opened_ns = 0  # when `up` started, or resumed
        self.serves_ns = 0  # when a gateway was first seen to accept requests
        self.stop_requested = False
        self.finished_at: int | None = None  # step at which training was reported finished
        self.steps: list[Step] = []  # the newest few, each once
        self.rewards: list[float] = []  # mean of each RL step
        self.warmup_steps = 0
        self.first_new: int | None = None  # step from which a resumed run trains tokens that it sampled since
        self.version: int | None = None  # newest published
        self.unchanged = WeightsUnchanged(0, 0, "")  # the newest one
        self.rejected = ""  # why no version was published since the newest one
        self.lineage = 0
        self.published_ns = 0
        self.checkpoint: int | None = None  # step of the newest
        self.packed: int | None = None  # newest batch
        self.packed_ns = 0
        self.drops: dict[str, int] = {}  # groups dropped since the newest batch, by reason
        self.evals: list[EvalScored] = []
        self.failed = Trouble("trajectory", "failed")
        self.dead = Trouble("message", "rejected")
        self.letters: list[Letter] = []  # the newest few
        self.stalls: dict[tuple[str, str], StallFound] = {}  # the open causes that keep the run from advancing
        self.queues: dict[str, dict[str, int]] = {}
        self.streams: dict[str, StreamFill] = {}
        self.figures: dict[str, float] = {}  # of the trajectories of the newest batch that was trained
        self.trimmed_bytes = self.trims = 0  # of payload streams, since the beginning
        self.stages: list[StageBegan] = []  # of the data, in their order
        self.paused = ""  # why admission is paused
        self.ended: set[str] = set()  # group mates of long-held trajectories that have a grade or failed
        self.disks: list[Disk] = []
        self.unreachable = ""  # why the server cannot be asked
        self.denied = ""  # topics that this user may not read
        self._events: deque[Event] = deque(maxlen=_EVENTS)

    def apply(self, topic: Topic[Message], message: Message | Headers, record: Record) -> None:
        """Fold one message in; of `batch.packed` the headers are enough."""
        if topic.message is not Vitals:
            self.first_ns = min(self.first_ns or record.time_ns, record.time_ns)
            self.last_ns = max(self.last_ns, record.time_ns)
        super().apply(topic, message, record)

    def _on_packed(self, headers: BatchPackedHeaders, record: Record) -> None:
        self.packed, self.packed_ns, self.drops, self.failed.new = headers.step, record.time_ns, {}, {}

    def on_gone(self) -> None:
        """Note that no process of the run is left, although its logs show no end."""
        if self.phase == "starting" and self.failure:
            self.phase = "failed"  # its supervisor was not started again
        elif not self.over:
            self.phase, self.failure = "crashed", f"it was killed; continue with `asyncrl up --resume {self.run}`"
        for actor in self.actors.values():
            actor.stopped_ns = max(actor.stopped_ns, actor.since_ns)

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in the order they were read."""
        events = list(self._events)
        self._events.clear()
        return events

    def report(self, kind: EventKind, time_ns: int, text: str) -> None:
        """Note something worth a line; what happened before the run was resumed is not."""
        if time_ns >= self.opened_ns:
            if len(self._events) == _EVENTS and kind == self._events[-1].kind == "step":
                self._events.pop()  # steps of a long run leave the news
            self._events.append(Event(kind, time_ns, text))

    # -- what follows from it

    @property
    def over(self) -> bool:
        """Return whether nothing more will come."""
        return self.phase in ("finished", "stopped", "failed", "crashed")

    @property
    def takes_requests(self) -> bool:
        """Return whether a supervisor answers requests, or will when it is there again."""
        return self.phase in ("starting", "running")

    @property
    def finished(self) -> bool:
        """Return whether training is over: an extended run has finished before and continues."""
        return self.finished_at is not None and self.finished_at >= self.total

    @property
    def newest(self) -> BatchTrained | None:
        """The newest optimiser step."""
        return self.steps[-1].message if self.steps else None

    @property
    def trained(self) -> int:
        """Newest step in the weights."""
        return self.steps[-1].message.step if self.steps else self.config.origin

    @property
    def owed(self) -> int | None:
        """Version that was trained and is not published yet, else None."""
        version = self.trained // self.config.learner.publish_every * self.config.learner.publish_every
        return version if self.version is not None and version > self.version else None

    @property
    def lags(self) -> dict[int, int]:
        """Trained tokens per lag over the recent RL steps."""
        found: dict[int, int] = {}
        for step in self.steps[-RECENT_STEPS:]:
            for lag, tokens in step.message.lags.items() if step.message.stage == "rl" else ():
                found[lag] = found.get(lag, 0) + tokens
        return dict(sorted(found.items()))

    @property
    def mean_lag(self) -> float | None:
        """Mean lag of the tokens trained in recent RL steps, versions."""
        lags = self.lags
        tokens = sum(lags.values())
        return sum(lag * count for lag, count in lags.items()) / tokens if tokens else None

    @property
    def too_old(self) -> float:
        """Share of the tokens of the newest batches that were too old to be trained on, 0 to 1."""
        recent = [step.message for step in self.steps[-RECENT_STEPS:] if step.message.stage == "rl"]
        masked = sum(batch.masked for batch in recent)
        return masked / max(1, masked + sum(sum(batch.lags.values()) for batch in recent))

    @property
    def metrics(self) -> dict[str, float]:
        """Of the newest step: of the learner, and of the trajectories of its batch."""
        return (self.steps[-1].message.metrics if self.steps else {}) | self.figures

    @property
    def payloads(self) -> dict[str, StreamFill]:
        """The streams of tokens and blobs, which are trimmed."""
        payloads = [stream.name for stream in self.tables.streams if stream.keep is Retention.PAYLOAD]
        return {name: fill for name, fill in self.streams.items() if name in payloads}

    def rates(self) -> dict[str, float]:
        """Steps, trajectories and tokens trained, and tokens sampled, per second; unknown ones are left out."""
        found: dict[str, float] = {}
        sampled = sum(actor.tokens_per_s for actor in self.actors.values() if actor.live)
        if sampled:
            found["sampled_tokens"] = sampled
        stage = self.newest.stage if self.newest is not None else None
        steps = [step for step in self.steps if step.message.stage == stage and step.time_ns >= self.opened_ns]
        if self.first_new is not None:
            steps = [step for step in steps if step.message.step >= self.first_new]
        seconds = (steps[-1].time_ns - steps[0].time_ns) / 1e9 if steps else 0.0
        if seconds > 0 and self.paused_by is None:
            found["trained_tokens"] = sum(sum(step.message.lags.values()) for step in steps[1:]) / seconds
            found["trajectories"] = sum(step.message.trajectories for step in steps[1:]) / seconds
            found["steps"] = (len(steps) - 1) / seconds
        return found

    def since_s(self, time_ns: int) -> float:
        """Seconds between a moment of the server's clock and now."""
        return (self.now_ns - time_ns) / 1e9

    # -- training

    def _on_trained(self, message: BatchTrained, record: Record) -> None:
        before = [step for step in self.steps if step.message.step < message.step]
        if before and before[-1].time_ns < self.opened_ns <= record.time_ns:
            # This many batches of groups may have been open when the run ended.
            self.first_new = message.step + self.config.buffer.max_lag + 1
        self.steps = [*before, Step(message, record.time_ns)][-RECENT_STEPS - 1 :]
        if message.stage == "warmup":
            done, every = message.step + self.warmup_steps, max(1, self.warmup_steps // 10)
            if done % every == 0 and done < self.warmup_steps:
                self.report("step", record.time_ns, f"step {done:,} of {self.warmup_steps:,} of warm-up")
            return
        reward = message.rewards[0]
        self.rewards.append(reward)
        total = f" of {self.total:,}" if self.total else ""
        lag = "" if self.mean_lag is None else f"  lag {self.mean_lag:.2f}"
        rate = self.rates().get("trained_tokens")
        speed = "" if rate is None else f"  {rate:,.0f} tokens/s"
        waste = f"  {self.too_old:.0%} too old" if self.too_old >= _WASTE else ""
        self.report("step", record.time_ns, f"step {message.step:,}{total}  reward {reward:.3f}{lag}{speed}{waste}")

    def _on_published(self, message: WeightsPublished, record: Record) -> None:
        if message.lineage > self.lineage:
            text = f"lineage {message.lineage} begins: the learner continued with other weights than it published"
            self.report("warning", record.time_ns, text)
        if self.version is None and message.version == self.config.start.step:
            warmed = f" after {counted(self.warmup_steps, 'step')} of warm-up" if self.warmup_steps else ""
            self.report("news", record.time_ns, f"version {message.version} published{warmed}")
        self.lineage, self.version, self.published_ns = message.lineage, message.version, record.time_ns
        self.rejected = ""

    def _on_unchanged(self, message: WeightsUnchanged, _: Record) -> None:
        self.unchanged = message

    def _on_rejected(self, message: WeightsRejected, record: Record) -> None:
        self.rejected = message.reason if record.time_ns > self.opened_ns else ""

    def _on_saved(self, message: CheckpointSaved, _: Record) -> None:
        self.checkpoint = message.step

    def _on_scored(self, message: EvalScored, record: Record) -> None:
        self.evals.append(msgspec.structs.replace(message, members=[]))  # these stay small
        self.report("news", record.time_ns, evaluation_text(message))

    def _on_finished(self, message: TrainingFinished, record: Record) -> None:
        self.finished_at = message.step
        if self.finished and self.phase in ("starting", "running"):
            self.phase = "stopping"
        elif self.finished and self.phase == "stopped" and not self.stop_requested:
            self.phase = "finished"  # logs are read concurrently: the end of the run may be known already
            found = [one._replace(text="finished") if one.text == "stopped" else one for one in self._events]
            self._events = deque(found, maxlen=_EVENTS)
        where = f"; model in {message.exported}" if message.exported else ""
        self.report("news", record.time_ns, f"training finished at step {message.step}{where}")

    def _on_stage_began(self, message: StageBegan, record: Record) -> None:
        self.stages.append(message)
        self.report("news", record.time_ns, f"stage {message.name} from prompt {prompt_name(TASK, message.prompt)} on")

    @property
    def stages_begun(self) -> list[Begun]:
        """Its stages by number of their first prompt, those before a fork first."""
        return [*first_stages(self.config.start), *((began.prompt, began.name) for began in self.stages)]

    # -- faults, and room

    def _on_trajectory_failed(self, message: TrajectoryFailed, record: Record) -> None:
        words = f"{message.trajectory_id} {message.reason}: {message.detail}"
        self._count(self.failed, one_line(words, f"explain {message.trajectory_id}"), record.time_ns, message.reason)

    def _on_group_dropped(self, message: GroupDropped, _: Record) -> None:
        self.drops[message.reason] = self.drops.get(message.reason, 0) + 1

    def _on_dead_letter(self, message: DeadLetter, record: Record) -> None:
        self.letters = [*self.letters, Letter(message.topic, message.reason, record.time_ns)][-_LETTERS:]
        words = f"{message.topic}, number {message.sequence} of {message.stream}: {message.reason}"
        self._count(self.dead, words, record.time_ns)

    def _count(self, trouble: Trouble, words: str, time_ns: int, kind: str = "") -> None:
        if trouble.add(words, kind):
            self.report("warning", time_ns, str(trouble))

    def _on_trimmed(self, message: StreamTrimmed, _: Record) -> None:
        self.trims += 1
        self.trimmed_bytes += message.bytes

    def _on_paused(self, message: AdmissionPaused, record: Record) -> None:
        self.paused = message.reason
        self.report("warning", record.time_ns, f"admission paused: {message.reason}")

    def _on_resumed(self, message: AdmissionResumed, record: Record) -> None:
        self.paused = ""
        self.report("news", record.time_ns, f"admission resumed: {message.reason}")

    def _on_stall_found(self, message: StallFound, record: Record) -> None:
        if record.time_ns >= self.opened_ns:
            self.stalls[message.cause, message.object] = message
            words = f"{message.cause}: {message.object}: {message.evidence}"
            self.report("warning", record.time_ns, one_line(words, f"logs {message.object}"))

    def _on_stall_ended(self, message: StallEnded, record: Record) -> None:
        if self.stalls.pop((message.cause, message.object), None) is not None:
            self.report("news", record.time_ns, f"over: {message.cause}: {message.object}")

    # -- actors

    def _on_vitals(self, message: Vitals, record: Record) -> None:
        super()._on_vitals(message, record)
        if self.serves_ns < self.opened_ns <= record.time_ns and message.values.get(LISTENS):
            self.serves_ns = record.time_ns
            self.report("news", record.time_ns, "the gateway accepts requests")

    def _on_opened(self, message: RunOpened, record: Record) -> None:
        """A run starts or resumes: earlier requests and ends are past."""
        resumed = self.opened_ns > 0
        self.config = read_settings(message.settings)
        self.total, self.warmup_steps, self.opened_ns = message.steps, message.warmup_steps, record.time_ns
        self.phase, self.failure, self.stop_requested = "starting", "", False
        self.stalls.clear()
        for actor in self.actors.values() if resumed else ():
            actor.on_opened(record.time_ns)
        self._events = deque((event for event in self._events if event.time_ns >= record.time_ns), maxlen=_EVENTS)
        if resumed:
            self.report("news", record.time_ns, "resumed")

    def _on_stop_requested(self, message: StopRequested, record: Record) -> None:
        self.phase, self.stop_requested = "stopping", True
        self.report("news", record.time_ns, f"asked to stop{': ' + message.reason if message.reason else ''}")

    def _on_scaled(self, message: FleetScaled, record: Record) -> None:
        if self.wanted and message.wanted:
            fleet = ", ".join(f"{role} {count}" for role, count in message.wanted.items())
            why = f" ({message.by}: {message.reason})" if message.reason else ""
            self.report("news", record.time_ns, f"fleet scaled: {fleet}{why}")
        self.note_scaled(message, record)

    def _on_started(self, message: ActorStarted, record: Record) -> None:
        actor = self.actors.setdefault(message.actor_id, Actor(message.actor_id, message.role))
        first, died = not actor.starts, actor.live
        actor.on_started(message, record.time_ns)
        if message.actor_id == SUPERVISOR:
            self.phase, self.failure = "running", ""
            if first:
                self.report("news", record.time_ns, "started")
        if message.lost:
            words = one_line(f"{actor.actor_id}: {message.lost}", f"logs {actor.actor_id}")
            self.report("warning", record.time_ns, words)
        elif died:
            self.report("warning", record.time_ns, f"{actor.actor_id} died without an error message")
        if actor.restarts:
            self.report("news", record.time_ns, f"{actor.actor_id} started again")

    def _on_leaving(self, message: ActorLeaving, record: Record) -> None:
        if message.actor_id in self.actors:
            self.actors[message.actor_id].on_leaving(record.time_ns)
            self.report("news", record.time_ns, f"{message.actor_id} restarts, and serves until its next process does")

    def _on_stopped(self, message: ActorStopped, record: Record) -> None:
        actor = self.actors.setdefault(message.actor_id, Actor(message.actor_id, message.role))
        actor.on_stopped(message, record.time_ns)
        if message.actor_id == SUPERVISOR and not message.again:
            self.failure = message.reason
            ended: Phase = "finished" if self.finished and not self.stop_requested else "stopped"
            self.phase = "failed" if message.reason else ended
            self.report("warning" if message.reason else "news", record.time_ns, self.phase)
        elif message.reason:
            if message.actor_id == SUPERVISOR and self.takes_requests:
                self.phase, self.failure = "starting", message.reason  # `asyncrl up` starts it again
            words = one_line(f"{message.actor_id} died: {message.reason}", f"logs {message.actor_id}")
            self.report("warning", record.time_ns, words)
