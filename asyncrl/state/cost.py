"""The cost of a run, from its logs: GPU hours, tokens and seconds by cause, and what to scale first."""

from __future__ import annotations

import time

import msgspec

from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.bus.merged_reader import read_fold
from asyncrl.bus.provision import queue_states
from asyncrl.config.devices import shares_with_learner
from asyncrl.config.renamed import read_settings
from asyncrl.config.settings import Config
from asyncrl.run.connect import FoundRun, opened
from topics.actors import ActorLeaving, ActorStarted, ActorStopped, RunOpened
from topics.batches import BatchPacked, BatchTrained
from topics.engines import EngineReady, EngineUpdating
from topics.groups import GroupDropped
from topics.ids import stage_of
from topics.roles import role_of
from topics.topic import Topic
from topics.trajectories import TrajectoryDropped
from topics.wire import Headers, Message

_HOUR_NS = 3_600e9
_OF_STEPS = {"fetch_s": "fetching tokens", "publish_s": "copying weights", "save_s": "copying checkpoints"}
_WASTE = 0.2  # share of the sampled tokens above which the largest cause of waste comes first
_WAITS, _BUSY = 0.3, 0.1  # shares of waiting: above, the learner starves; below, the learner limits the run


class Cost(msgspec.Struct):
    """The cost of a run, live or over."""

    run: str
    wall_h: float  # hours between the first and the last message, without stops
    gpu_h: dict[str, float]  # GPU hours by role; a GPU that engines and learner share counts once, with the learner
    process_h: dict[str, float]  # process hours by role
    tokens: dict[str, int]  # sampled tokens by cause: trained, stale, discarded, and dropped for a reason
    learner_s: dict[str, float]  # seconds between the first and the last step of RL by cause
    engine_s: dict[str, float]  # seconds of all engines by cause
    price: float | None  # of the GPU hours, if a rate is given
    price_per_million_trained_tokens: float | None
    scale_first: str  # advice


class CostFold(Fold):
    """Hours, tokens and seconds of a run."""

    def __init__(self) -> None:
        self.config = Config()
        self.last_ns = 0  # newest message
        self.wall_ns = self._began_ns = 0  # of earlier parts of the run; when this part began
        self.role_ns: dict[str, int] = {}  # of all processes of a role, or of one engine
        self.learner_ns = 0  # with at least one learner
        self.tokens: dict[str, int] = {"trained": 0}
        self.train_s = self.wait_s = self.update_s = self.pause_s = 0.0
        self.step_s = dict.fromkeys(_OF_STEPS, 0.0)  # by figure of `batch.trained`
        self.rl_ns: list[int] = []  # first and last step of this part of the run
        self.rl_s = 0.0  # between the first and the last step, without stops
        self._training_ns = 0  # when the first of the living learners started; standbys take no GPU
        self._live: dict[str, int] = {}  # start of each living process, by actor
        self._updating: dict[str, int] = {}  # begin of each open update, by engine
        self._packed: set[int] = set()

    def apply(self, topic: Topic[Message], message: Message | Headers, record: Record) -> None:
        """Fold one message in."""
        if topic.message is not RunOpened:
            self.last_ns = max(self.last_ns, record.time_ns)
        super().apply(topic, message, record)

    def end(self, now_ns: int) -> None:
        """Count what lasts until now: the time of living processes, and of this part of the run."""
        for actor_id in list(self._live):
            self._ended(actor_id, now_ns)
        self.wall_ns += max(0, now_ns - self._began_ns) if self._began_ns else 0
        self.rl_s += (self.rl_ns[-1] - self.rl_ns[0]) / 1e9 if self.rl_ns else 0.0
        self.rl_ns, self._began_ns = [], 0

    def _on_opened(self, message: RunOpened, record: Record) -> None:
        self.end(self.last_ns or record.time_ns)
        self._began_ns = self.last_ns = record.time_ns
        self.config = read_settings(message.settings)

    def _on_started(self, message: ActorStarted, record: Record) -> None:
        if not message.lost:
            self._ended(message.actor_id, record.time_ns)  # a process that was killed
            self._live[message.actor_id] = record.time_ns
            if message.role == "learner":
                self._training_ns = self._training_ns or record.time_ns

    def _on_leaving(self, message: ActorLeaving, record: Record) -> None:
        self._ended(message.actor_id, record.time_ns)

    def _on_stopped(self, message: ActorStopped, record: Record) -> None:
        self._ended(message.actor_id, record.time_ns)

    def _ended(self, actor_id: str, at_ns: int) -> None:
        if (since_ns := self._live.pop(actor_id, None)) is None:
            return
        name = actor_id if role_of(actor_id) == "engine" else role_of(actor_id)
        self.role_ns[name] = self.role_ns.get(name, 0) + max(0, at_ns - since_ns)
        if self._training_ns and not any(role_of(other) == "learner" for other in self._live):
            self.learner_ns += max(0, at_ns - self._training_ns)
            self._training_ns = 0

    def _on_trained(self, message: BatchTrained, record: Record) -> None:
        if message.stage != "rl":
            return
        self.train_s += message.metrics.get("train_s", 0.0)
        self.wait_s += message.metrics.get("wait_s", 0.0)
        for figure in _OF_STEPS:
            self.step_s[figure] += message.metrics.get(figure, 0.0)
        trained = sum(message.lags.values())
        self._count("trained", trained)
        self._count("stale", message.masked)
        begun_ns = int(1e9 * (message.metrics.get("train_s", 0.0) + message.metrics.get("wait_s", 0.0)))
        self.rl_ns = [*(self.rl_ns[:1] or [record.time_ns - begun_ns]), record.time_ns]

    def _on_packed(self, message: BatchPacked, _record: Record) -> None:
        if message.stage == "rl" and message.step not in self._packed:
            self._packed.add(message.step)
            self._count("discarded", int(message.figures.get("discarded_tokens", 0)))

    def _on_dropped(self, message: TrajectoryDropped, _record: Record) -> None:
        if stage_of(message.trajectory_id) != "eval":
            self._count(f"dropped: {message.reason}", message.tokens)

    def _on_group_dropped(self, message: GroupDropped, _record: Record) -> None:
        self._count(f"dropped: {message.reason}", message.tokens)

    def _count(self, cause: str, tokens: int) -> None:
        if tokens:
            self.tokens[cause] = self.tokens.get(cause, 0) + tokens

    def _on_updating(self, message: EngineUpdating, record: Record) -> None:
        self._updating[message.engine_id] = record.time_ns

    def _on_ready(self, message: EngineReady, record: Record) -> None:
        if since_ns := self._updating.pop(message.engine_id, 0):
            self.update_s += (record.time_ns - since_ns) / 1e9
            self.pause_s += message.pause_s

    # -- what follows from it

    def cost(self, run: str, rate: float | None, waiting: dict[str, int]) -> Cost:
        """Return the cost of a run whose logs were read.

        Args:
            run: its name.
            rate: price of one GPU hour.
            waiting: messages in each work queue.
        """
        hours: dict[str, float] = {}
        gpus: dict[str, float] = {}
        for name, spent_ns in self.role_ns.items():
            role = role_of(name)
            hours[role] = hours.get(role, 0.0) + spent_ns / _HOUR_NS
            if count := self._gpus(name):
                used_ns = self.learner_ns if role == "learner" else spent_ns
                gpus[role] = gpus.get(role, 0.0) + count * used_ns / _HOUR_NS
        price = None if rate is None else rate * sum(gpus.values())
        trained = self.tokens["trained"]
        engine_s = hours.get("engine", 0.0) * 3600
        other_s = max(0.0, self.rl_s - self.train_s - self.wait_s - sum(self.step_s.values()))
        return Cost(
            run=run,
            wall_h=round(self.wall_ns / _HOUR_NS, 4),
            gpu_h={role: round(value, 4) for role, value in sorted(gpus.items())},
            process_h={role: round(value, 4) for role, value in sorted(hours.items())},
            tokens=self.tokens,
            learner_s={
                "training": round(self.train_s, 1),
                "waiting for batches": round(self.wait_s, 1),
                **{cause: round(self.step_s[figure], 1) for figure, cause in _OF_STEPS.items()},
                "other work and stops of the learner": round(other_s, 1),
            },
            engine_s={
                "paused by updates of weights": round(self.pause_s, 1),
                "updating weights, while requests run": round(max(0.0, self.update_s - self.pause_s), 1),
                "serving or idle": round(max(0.0, engine_s - self.update_s), 1),
            },
            price=None if price is None else round(price, 2),
            price_per_million_trained_tokens=round(price / trained * 1e6, 4) if price is not None and trained else None,
            scale_first=self._scale_first(waiting),
        )

    def _gpus(self, name: str) -> int:
        """Return the GPUs that one process of a role, or one engine, takes."""
        if role_of(name) == "learner":
            return self.config.learner.ranks if self.config.learner.device != "cpu" else 0
        turns = self.config.placement.colocate == "time_slice"
        if role_of(name) != "engine" or (turns and shares_with_learner(self.config, name)):
            return 0
        group = self.config.engine.group_of(name)
        return group.gpus_needed if group.on_gpus else 0

    def _scale_first(self, waiting: dict[str, int]) -> str:
        sampled, trained = sum(self.tokens.values()), self.tokens["trained"]
        if not trained or not (spent_s := self.train_s + self.wait_s):
            return "nothing yet: the run has trained no step of RL"
        wasted = {cause: tokens / sampled for cause, tokens in self.tokens.items() if cause != "trained"}
        cause = max(wasted, key=wasted.__getitem__, default="")
        if cause and wasted[cause] > _WASTE:
            advice = "less data in advance (fewer rollout.slots) or a higher buffer.max_lag trains them"
            remedy = advice if cause in ("stale", "dropped: lag") else "`asyncrl doctor` and `asyncrl explain` show why"
            return f"nothing: {wasted[cause]:.0%} of the sampled tokens are lost ({cause}); {remedy}"
        waits = self.wait_s / spent_s
        if waits > _WAITS:
            role = "reward" if waiting.get("reward", 0) > waiting.get("rollout", 0) else "engine"
            return f"{role}: the learner waits for batches {waits:.0%} of its time"
        if waits < _BUSY:
            return f"learner: it waits for batches only {waits:.0%} of its time; give it more GPUs (learner.ranks)"
        return f"nothing: the learner waits for batches {waits:.0%} of its time, so both sides are balanced"


async def read_cost(found: FoundRun, rate: float | None = None) -> Cost:
    """Read the cost of a run, live or over, from its logs.

    Args:
        rate: price of one GPU hour.

    Raises:
        RunNotFound: the run cannot be reached.
    """
    fold = CostFold()
    async with opened(found, "cost") as bus:
        await read_fold(bus, fold)
        queues = await queue_states(bus)
    fold.end(time.time_ns() if found.root is not None and found.is_held else fold.last_ns)
    return fold.cost(found.run, rate, {name: queue["waiting"] for name, queue in queues.items()})
