"""Settings of live traffic: gateway, canaries, judges, and bounds of live training.

The comment of a field documents it: `asyncrl settings` and docs/reference/settings.md print the comment.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from asyncrl.config.finding import Finding
from asyncrl.config.setting_types import Count, NonNegative, Positive, Rate, Seconds, Settings, Share

JUDGES = ("rule", "endpoint", "engine")
"""The kinds of judges: the `KIND` of `asyncrl.judges.NAME` describes each."""

if TYPE_CHECKING:
    from asyncrl.child_pool.frames import Setup

    JudgeName: TypeAlias = str
else:
    JudgeName = Literal[("", *JUDGES)]


class GatewaySettings(Settings):
    """The gateway: the HTTP APIs through which people and agents talk to the policy."""

    count: Annotated[int, Meta(ge=0, le=32)] = 0  # Gateways that share the port; 0: none.
    # Address of this machine that it listens on, without TLS.
    host: str = "127.0.0.1"
    # Port that it listens on, which the run keeps for it from its start; 0: any free one, which `asyncrl up` prints.
    port: Annotated[int, Meta(ge=0, le=65535)] = 8321
    page: bool = False  # Whether `/` is a page to chat with the model and to vote on its replies.
    # Origins of web pages that may call the APIs from a browser (CORS), such as `https://chat.example.org`; `*`: any.
    origins: list[str] = msgspec.field(default_factory=list)
    # Names of models that requests may give; empty: any, and the list of models has the run's name.
    models: list[str] = msgspec.field(default_factory=list)
    # Tenants that get a key when the run starts, in the file `keys/NAME` of its directory; others: `asyncrl keys add`.
    tenants: list[str] = msgspec.field(default_factory=list)
    # Name of the group `[engine.groups.NAME]` that serves only the gateway: its engines stay at the version of the
    # channel `live`. Empty: the engines of training answer, with the newest version that each has.
    engines: str = ""
    # Name of the group whose engines have the version of a canary, and without one that which is live; they answer the
    # canary's sessions only. Empty: there are no canaries.
    canary_engines: str = ""
    max_new_tokens: Positive = 1024  # Tokens of a reply whose request names no limit.
    stream_tokens: Positive = 4  # Tokens that are streamed together, after the first.
    # Seconds of sampling that are streamed together if that is more than `stream_tokens`, at the speed of earlier
    # replies: events of fast engines cost cores, and readers do not see them. 0: always `stream_tokens`.
    stream_s: NonNegative = 0.02
    keepalive_s: Seconds = 5.0  # Seconds without text after which a stream gets an event that keeps its client waiting.
    # Seconds that a reply may take in all, the wait for an engine included, before it fails as overloaded.
    deadline_s: Seconds = 600.0
    # Seconds that a request without a token may wait for a place or an engine before it is refused as overloaded.
    queue_timeout_s: Seconds = 20.0
    # Seconds that running replies have when a gateway restarts; the next process takes new requests.
    drain_s: Seconds = 60.0
    # Seconds for which a repeated request continues the reply of its cut predecessor.
    retry_s: Seconds = 300.0
    # Requests at once of each gateway; as many more wait, and further ones are refused as overloaded. Free slots go to
    # the tenants with the fewest requests; with several tenants, none can use more than 7/8 of them.
    in_flight: Positive = 256
    # Nice value that is added to all processes of the run that no client of a gateway waits for, and once more to the
    # learner's ranks, which compute most (19 at most). On shared cores, gateways, their engines, the router, the NATS
    # server and the supervisor have priority. 0: equal priority.
    nice: Annotated[int, Meta(ge=0, le=19)] = 10
    # What computes only while no other process of the run wants its core (Linux: SCHED_IDLE): one that serves has it at
    # once. `ranks`: the threads in which the learner's ranks compute. `all`: all processes that have the nice value;
    # where serving takes all cores for seconds, the supervisor takes them for dead. Training then pauses.
    idle: Literal["none", "ranks", "all"] = "none"
    # Connections at once of each gateway; a further one takes the place of one on which no request is answered, or gets
    # a 503.
    connections: Positive = 2048
    # Seconds after which a connection without a whole request is closed: idle, or in the middle of its headers.
    connection_s: Seconds = 120.0
    # Seconds for which an embedded engine of the gateway waits for a moment without client requests before it loads a
    # new version; then it ends and resends running requests (`weights.update`). 0: at once.
    idle_wait_s: NonNegative = 0.25
    body_kb: Positive = 8192  # Greatest size of a request's body.
    # Writer of the text after a reply: `difference`, the chat template by difference; a family of the package
    # `renderers`, such as "qwen3", whose program must write as the template does; `auto`: the family if the package is
    # installed and has the template's family, otherwise by difference.
    renderer: Annotated[str, Meta(min_length=1)] = "auto"
    history_tokens: Positive = 4_000_000  # Tokens of conversations that are kept to be continued, the newest.
    # MB of turns that wait on the disk while the NATS server is away; replies beyond it are given, and not recorded.
    spool_mb: Positive = 64
    # MB of turns that a run keeps; beyond it replies are given, and not recorded. All that are kept stay until its end.
    turns_mb: Positive = 512


class CanarySettings(Settings):
    """Canaries: versions that a share of sessions is answered by before they are promoted to the channel `live`."""

    # Share of the sessions that a version gets which the gate passes, or the newest one; 0: the gate promotes it at
    # once. `asyncrl weights promote --canary` names its own share.
    share: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    # Whether the newest version becomes a canary whenever there is none, so that the live version follows training by
    # live reward.
    newest: bool = False
    turns: Positive = 64  # Graded turns, of the canary and of the others, that are compared.
    # The canary is promoted where its mean reward is at least that of the others less this; else it is rolled back.
    margin: NonNegative = 0.1


class HindsightSettings(Settings):
    """Hindsight distillation of live turns: log-probs of a frozen copy of the policy for a reply after a hint."""

    w_rl: NonNegative = 1.0  # With `combine`: weight of the reward in the advantage of each token.
    w_opd: NonNegative = 1.0  # Weight of the differences of log-probs in it.
    clip: Rate = 1.0  # Bound of a difference, in nats.
    # Tokens of each place that the policy finds most probable, which all have a difference; 0: the sampled token alone.
    top_k: Count = 0
    # Text after the last message of the prompt for the teacher; {hint} is replaced by the judge's hint.
    wording: str = "\n\n[user's hint / instruction]\n{hint}"


def estimator_of(method: Literal["binary", "distillation", "combine"], advantage: str) -> str:
    """Return the name in `ADVANTAGES` of the estimator of live turns.

    Args:
        method: `live.method`.
        advantage: of the reward alone: `live.advantage`, or `rloo` of several turns with one prompt.
    """
    if method == "binary":
        return advantage
    if method == "distillation":
        return "hindsight"
    return "combine" if advantage == "none" else f"combine_{advantage}"


class JudgeSettings(Settings):
    """Judges: what followed a reply says how good it was (docs/guides/judges.md)."""

    # `rule`: a function; `endpoint`: an OpenAI-compatible chat endpoint; `engine`: the run's own model; empty: none.
    kind: JudgeName = ""
    workers: Positive = 1  # Judge processes at start.
    in_flight: Positive = 32  # Turns that one process holds at once.
    votes: Positive = 1  # Votes on each turn; their majority is its reward.
    # Seconds that one vote may take, with all tries; one that takes longer does not count.
    deadline_s: Seconds = 60.0
    history_tokens: Positive = 4096  # Tokens that a judge sees of the prompt, its last, and of reply and evidence each.
    # With `rule`: your function, `path/file.py:function` or `package.module:function`; empty looks for words such as
    # `good` and `wrong` in what followed.
    function: str = ""
    children: Positive = 1  # With `rule`: child processes that one judge process runs your function in.
    url: str = ""  # With `endpoint`: its address up to and with `/v1`.
    model: str = ""  # With `endpoint`: name of the model.
    api_key_file: str = ""  # With `endpoint`: file with its API key, if it needs one.
    # With `engine`: name of the group `[engine.groups.NAME]` that votes, with the run's first version, and does nothing
    # else: training does not change it. Empty: the engines of training vote, with the newest version that each has.
    engines: str = ""
    temperature: NonNegative = 0.6  # With `endpoint` and `engine`: temperature of a vote.
    max_new_tokens: Positive = 1024  # With `endpoint` and `engine`: tokens of a vote, its reasoning included.


class JudgeKind:
    """A kind of judges."""

    keys: ClassVar[tuple[str, ...]] = ()  # settings that only some kinds have
    opener: ClassVar[str] = ""  # module:name of what opens an `asyncrl.judges.protocol.Judge` from its `JudgeParts`

    def checks(self, _judge: JudgeSettings) -> Iterator[Finding]:
        """Find invalid settings."""
        yield from ()

    def hint_problem(self, _judge: JudgeSettings) -> str:
        """Return why its votes have no hints; empty if they may have some."""
        return ""

    def setup(self, _judge: JudgeSettings, _base: Path) -> Setup | None:
        """Return the setup by which a child process loads a function of the user, if the settings name one."""
        return None


@cache
def judge_kind(name: str) -> JudgeKind:
    """The kind of a name."""
    kind: JudgeKind = import_module(f"asyncrl.judges.{name}").KIND
    return kind


class RewardGateSettings(Settings):
    """The gate of live reward: what users give the versions that answer them moves the channel `live`, and back."""

    # Graded turns whose mean counts; 0: live reward moves nothing. A version newer than the live one is promoted by the
    # turns of newer versions, and the live version is rolled back by its own turns.
    turns: Annotated[int, Meta(ge=0, le=512)] = 0
    margin: NonNegative = 0.1  # By which the mean may lie below that of what users had before.


class SafetySettings(Settings):
    """Bounds of training on live turns, and of the figures that the doctor reports."""

    # Greatest share of a batch's groups that are turns of one tenant, rounded up; others wait for the next batch.
    tenant_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    # Turns of a user with one and the same prompt and reply that are trained of a day, per gateway and among the newest
    # 4,096; 0: any number.
    repeats: Count = 0
    reward: Annotated[float, Meta(gt=0)] = 1.0  # Greatest absolute reward; a larger one is cut down to it.
    # Greatest share of 4-grams of a reply that occurred in it before; it is not trained above. 1: any.
    repetition: Share = 0.95
    garbage: Share = 0.2  # The same of its characters that no writing has.
    # Regular expression of a reply that asks its user needlessly, searched without regard to case; empty: none is.
    question: str = ""
    # Share of the newest 128 replies with a call of a tool that is none, above which the doctor reports it.
    invalid_calls: Share = 0.1
    questions: Share = 0.2  # The same of replies that ask needlessly.
    disagreement: Share = 0.3  # The same of grades of judges against which users spoke.
    # Greatest KL of the policy to the reference with which a version is promoted: nats (k3) per token of live turns, in
    # the mean of the newest 8 steps up to the version. 0: it is not measured.
    kl_bound: Annotated[float, Meta(ge=0)] = 0.0
    # Factor, up or down, by which the mean length of the newest 128 replies may differ from the first 128 of the run.
    length_drift: Annotated[float, Meta(gt=1)] = 3.0


class LiveSettings(Settings):
    """Learning from live traffic: judged turns of the gateway, in addition to the task."""

    # Share of the groups of RL that are graded turns, as long as some wait; 0: none, 1: nothing else.
    fraction: Annotated[float, Meta(ge=0, le=1)] = 0.0
    # `binary`: rewards; `distillation`: hints of judges, which a frozen copy of the policy is shown; `combine`: both.
    method: Literal["binary", "distillation", "combine"] = "binary"
    # Advantage of the reward of a turn: `none` takes the reward, `less_others` subtracts the mean of the other groups
    # of its batch. Of turns with one prompt it is the reward less the mean of the others of these.
    advantage: Literal["none", "less_others"] = "none"
    # Sampling that is trained though the log-probs of its tokens are not those of the distribution that they came from:
    # `greedy` (temperature 0), `truncated` (top_p, top_k, min_p), `constrained` (a form of the reply), `penalised`
    # (penalties, logit_bias).
    allow: list[Literal["greedy", "truncated", "constrained", "penalised"]] = msgspec.field(default_factory=list)
    # Factor of feedback on a session for each turn before the last: a turn with n turns after it gets the score times
    # discount to the power of n.
    discount: Share = 1.0
    # Seconds after which a session has ended in which nothing was asked and nothing answered.
    idle_s: Seconds = 1800.0
    # Seconds that a graded turn waits for the grades of others with its prompt, to be one group with them; 0: it waits
    # for none.
    siblings_s: NonNegative = 10.0
    judge_s: Seconds = 600.0  # Seconds that a turn waits for its grade before it is given up, untrained.
    # Days for which what users said can be read; then its data keys are erased. 0: until `asyncrl purge`.
    retention_days: Annotated[int, Meta(ge=0, le=36500)] = 0
    # Function of yours (path/to/file.py:function) that gets texts and returns them as they may be stored; "": none.
    redact: str = ""
    redact_s: Seconds = 5.0  # Seconds that it may take; of a turn that takes longer nothing is stored.
    hindsight: HindsightSettings = msgspec.field(default_factory=HindsightSettings)
    judge: JudgeSettings = msgspec.field(default_factory=JudgeSettings)
    safety: SafetySettings = msgspec.field(default_factory=SafetySettings)
