"""Parts of the state of a run: actors, engines, steps, streams, disks, events. Times are the server's clock, ns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from topics.actors import Activity, ActorStarted, ActorStopped, HeldWork, ScaledBy, Vitals
from topics.batches import BatchTrained
from topics.evals import EvalScored

EventKind: TypeAlias = Literal["step", "news", "warning"]
Process: TypeAlias = Literal["", "stopped", "gone"]  # "": lives, or is on another machine

LISTENS = "listens"  # vital sign of a gateway that accepts requests
SILENT_S = 6.0  # three vital signs
FLAT_STEPS = 5  # in a row with equal rewards, before that is worth a remark
_SOON_S = 60.0  # starts that count as one trouble lie within this
_STARTS = 16  # of an actor that are remembered


@dataclass
class Actor:
    """One process of a role."""

    actor_id: str
    role: str
    host: str = ""
    pid: int = 0
    starts: list[int] = field(default_factory=list)  # the newest few
    stopped_ns: int = 0
    asked: bool = False  # to stop, when it stopped last
    last_error: str = ""  # of its newest start that ended with a reason
    denied: bool = False  # that was a refusal of the server
    restarts: int = 0
    vitals: Vitals | None = None  # of this start
    seen_ns: int = 0
    tokens_per_s: float = 0.0  # sampled, between its last two vital signs
    process: Process = ""

    @property
    def live(self) -> bool:
        """Return whether it began after it last ended."""
        return bool(self.starts) and self.starts[-1] > self.stopped_ns

    @property
    def since_ns(self) -> int:
        """Return the time it was last seen."""
        return max(self.seen_ns, self.starts[-1] if self.starts else 0)

    @property
    def error(self) -> str:
        """Return the reason of its absence; empty if it is present, or was asked to leave."""
        return "" if self.live or self.asked else self.last_error

    @property
    def doing(self) -> Activity:
        """Return its newest reported activity."""
        return self.vitals.doing if self.vitals is not None else Activity()

    @property
    def held(self) -> list[HeldWork]:
        """Return the work that it has held for seconds."""
        return self.vitals.held if self.vitals is not None else []

    def gauge(self, name: str) -> float | None:
        """One of its vital signs."""
        return self.vitals.values.get(name) if self.vitals is not None else None

    def ago_s(self, name: str) -> float:
        """Seconds between a moment that its vital signs name and the vital signs; 0 if they name none."""
        at_s = self.gauge(name)
        return self.vitals.at_s - at_s if self.vitals is not None and at_s is not None else 0.0

    def quick_starts(self, now_ns: int, opened_ns: int) -> int:
        """Return how often it was started lately, since the run was opened: starts by the owner do not count."""
        return sum(now_ns - start < _SOON_S * 1e9 and start >= opened_ns for start in self.starts)

    def on_started(self, message: ActorStarted, time_ns: int) -> None:
        """Take in a start: after an end that was not requested it is a restart, otherwise a first start."""
        again = self.starts if self.live or not self.asked else []
        self.restarts = self.restarts + 1 if again else 0
        self.host, self.pid = message.host, message.pid
        self.starts = [*again, time_ns][-_STARTS:]
        self.tokens_per_s = 0.0

    def on_leaving(self, time_ns: int) -> None:
        """Note that it was asked to leave, and serves until its next process does."""
        self.stopped_ns, self.asked = time_ns, True

    def on_stopped(self, message: ActorStopped, time_ns: int) -> None:
        """Take in an end; that of a process before this one changes nothing."""
        if message.pid and self.live and self.pid not in (0, message.pid):
            return
        self.stopped_ns, self.asked, self.tokens_per_s = time_ns, not message.reason, 0.0
        if message.reason:
            self.last_error, self.denied = message.reason, message.denied

    def on_opened(self, time_ns: int) -> None:
        """Note that its owner restarts it with the run: the end of its former process is past."""
        self.stopped_ns = time_ns if self.live else self.stopped_ns
        self.asked, self.last_error, self.denied = True, "", False
        self.pid, self.vitals = 0, None  # vital signs of that process do not count any more

    def on_vitals(self, message: Vitals, time_ns: int) -> None:
        """Keep its newest vital signs, and the rate since the ones before."""
        self.seen_ns = time_ns
        before, self.vitals = self.vitals, message if message.pid == self.pid else None
        if before is not None and self.vitals is not None and message.at_s > before.at_s:
            gained = message.values.get("tokens", 0.0) - before.values.get("tokens", 0.0)
            self.tokens_per_s = max(0.0, gained) / (message.at_s - before.at_s)


@dataclass
class Engine:
    """The state that an inference server published."""

    engine_id: str
    address: str = ""
    version: int | None = None  # newest that it took requests with
    update_s: float = 0.0
    ready_ns: int = 0
    first_ns: int = 0  # when it was ready for the first time since its server began
    updating: int | None = None  # newest version that it began to take
    updating_ns: int = 0
    refused: int | None = None  # newest version whose bytes it could not take
    refused_ns: int = 0
    gone_ns: int = 0
    reason: str = ""  # why it is gone
    asked: bool = False  # it was asked to leave
    found: str = ""  # name of weights that another client gave it
    found_ns: int = 0
    fallback: str = ""  # why its newest version came from the store instead of directly
    fallbacks: int = 0  # such versions, one after another

    @property
    def state(self) -> Literal["ready", "updating", "gone"]:
        """Return the state by its newest message."""
        newest = max(self.ready_ns, self.updating_ns, self.gone_ns)
        if not newest:
            return "updating"  # it has refused the first one
        return "gone" if newest == self.gone_ns else "ready" if newest == self.ready_ns else "updating"

    @property
    def shown(self) -> int | None:
        """Return the version that it has, or is taking."""
        return self.updating if self.state == "updating" else self.version


class Scaling(NamedTuple):
    """The newest change of the number of processes of a pool."""

    before: int
    after: int
    by: ScaledBy
    reason: str
    time_ns: int


class Step(NamedTuple):
    """One optimiser step."""

    message: BatchTrained
    time_ns: int


def taught_nothing(trained: BatchTrained) -> bool:
    """Return whether all rewards of a step were equal, and no gradient came from anything else."""
    return not trained.rewards[1] and not trained.metrics.get("grad_norm")


class Letter(NamedTuple):
    """A message that was rejected."""

    topic: str
    reason: str
    time_ns: int


class Disk(NamedTuple):
    """A file system that the run writes to."""

    path: str
    free: int  # bytes
    total: int


@dataclass
class StreamFill:
    """The fill level of a stream."""

    bytes: int
    max_bytes: int
    messages: int = 0
    last_ns: int = 0  # time of the newest message

    @property
    def share(self) -> float:
        """0 to 1."""
        return self.bytes / self.max_bytes if self.max_bytes > 0 else 0.0


class Event(NamedTuple):
    """Something worth a line."""

    kind: EventKind
    time_ns: int  # server's clock
    text: str


class Trouble:
    """Count of a fault's occurrences, and its newest text."""

    def __init__(self, noun: str, fate: str) -> None:
        self.noun, self.fate = noun, fate  # "trajectory", "failed"
        self.count = 0
        self.last = ""
        self.new: dict[str, int] = {}  # by kind, since a batch was packed

    def add(self, last: str, kind: str = "") -> bool:
        """Count one; True when the count deserves a line: the first, the tenth, the hundredth ..."""
        self.count += 1
        self.last = last
        self.new[kind] = self.new.get(kind, 0) + 1
        return str(self.count).strip("0") == "1"

    def __str__(self) -> str:
        return f"{counted(self.count, self.noun)} {self.fate}; last: {self.last}"


def counted(count: int, noun: str) -> str:
    """`1 trajectory`, `2,000 trajectories`, `1 batch`, `2 batches`, `1 finding`, `2 findings`."""
    if count == 1:
        return f"1 {noun}"
    stem, ending = (
        (noun[:-1], "ies") if noun.endswith("y") else (noun, "es" if noun.endswith(("ch", "ss", "x")) else "s")
    )
    return f"{count:,} {stem}{ending}"


def duration(seconds: float) -> str:
    """`0:42`, `1:02:03`."""
    whole = max(0, int(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def one_line(text: str, command: str) -> str:
    """The first and the last line of a text of several, and the command that shows all of it."""
    first, *rest = text.strip().splitlines()
    if not rest:
        return text
    before, traceback, _ = first.partition("Traceback (most recent call last)")
    return f"{before if traceback else first + ' ... '}{rest[-1].strip()} (more: asyncrl {command})"


def spans_text(numbers: Iterable[int]) -> str:
    """Return numbers in their order, consecutive ones as `3 to 7`; "none" if there are none."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join(" to ".join(map(str, span)) for span in spans) or "none"


def evaluation_text(scored: EvalScored) -> str:
    """Return its version, accuracy and pass@k, the answers without a grade, and what other versions answered."""
    name = f" on {scored.dataset}" if scored.dataset else ""
    text = f"evaluation of version {scored.version}{name}: {scored.accuracy:.3f} on {counted(scored.prompts, 'prompt')}"
    text += f", {scored.samples} answers each" if scored.samples > 1 else ""
    text += "".join(f", {metric} {value:.3f}" for metric, value in scored.metrics.items() if metric.startswith("pass@"))
    if scored.failed:
        text += f", {scored.failed} without a grade"
    others = {version: tokens for version, tokens in scored.versions.items() if version != scored.version and tokens}
    if others:
        percent = 100 * sum(others.values()) / sum(scored.versions.values())
        numbers = " and ".join(map(str, sorted(others)))
        text += f", {percent:.0f} % of it by version{'s' if len(others) > 1 else ''} {numbers}"
    return text


def reward_text(reward: float, turn_rewards: Sequence[float]) -> str:
    """Return a reward with the rewards of its turns, if any."""
    turns = ", ".join(f"{value:g}" for value in turn_rewards)
    return f"reward {reward:g}" + (f" (turns {turns})" if turns else "")


def anomaly_text(step: BatchTrained) -> str:
    """Return the unusual figures of a step, and the trajectories that carry them."""
    assert step.anomaly is not None
    carriers = ", ".join(
        f"{one.trajectory_id} (gradient norm {one.grad_norm:.4g}, loss {one.loss:.4g})" for one in step.anomaly.carriers
    )
    return f"step {step.step}: {step.anomaly.found}; carried by {carriers}"
