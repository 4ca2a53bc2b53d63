"""Messages about live traffic: turns (a request and its reply each), and what becomes of them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta, field

from topics.payload_refs import Experts
from topics.topic import SESSIONS, TURNS, Topic
from topics.wire import Count, Float32Array, Headers, Id, Int32Array, MaybeId, Message, Real, SecretIds

ShortDigest = Annotated[str, Meta(max_length=32)]  # hexadecimal, or ""


Finish: TypeAlias = Literal["stop", "length", "gone", "failed"]  # gone: the client is; failed: no engine answered it
Score: TypeAlias = Annotated[float, Meta(ge=-1, le=1)]
LiveTemperature: TypeAlias = Annotated[float, Meta(ge=0, le=100)]
# Causes for which a turn is served and not trained. Known when it starts: side (a header or its text says so), greedy
# (temperature 0), truncated (top_p, top_k, min_p), constrained (a form of the reply), penalised (penalties,
# logit_bias), redacted (by `live.redact`; of the reply when it ends). When it ends: gone, failed, empty (no
# token). Later: lost (its end never arrived), unjudged (no judge answered in time), ungraded (no valid vote), off
# (`live.fraction` is 0), garbage (quarantined), repeat (the same prompt and reply again), behind (older than
# `buffer.max_lag` allows), surplus (too many newer turns wait), purged (its data key was erased).
EarlySkip: TypeAlias = Literal["side", "greedy", "truncated", "constrained", "penalised", "redacted"]
LateSkip: TypeAlias = Literal["unjudged", "ungraded", "off", "garbage", "repeat", "behind", "surplus", "purged"]
SkipReason: TypeAlias = EarlySkip | Literal["gone", "failed", "empty", "lost"] | LateSkip
Mark: TypeAlias = Literal[
    "invalid call", "question", "garbage", "redacted"
]  # of a reply, see `asyncrl.live.reply_flags`


class TurnStartedHeaders(Headers):
    """Headers that deciding needs: a fold of turns reads no tokens."""

    turn_id: Id
    session: Id
    tenant: Id
    temperature: LiveTemperature
    parent: MaybeId = ""
    skip: EarlySkip | None = None
    continues: MaybeId = ""
    secret: SecretIds = ""
    older: SecretIds = ""
    siblings: ShortDigest = ""
    api_key: MaybeId = ""
    prompt_tokens: Count = 0


class TurnStarted(Message):
    """A request is about to be answered."""

    HEADERS: ClassVar[type[Headers]] = TurnStartedHeaders

    turn_id: Id
    session: Id  # of the tenant, who may hold several conversations in it
    tenant: Id
    api: Id  # name in `asyncrl.live.apis.registry.APIS`
    tokens: Int32Array  # [P - known] of the prompt, after the prompt of its parent
    parent: MaybeId = ""  # the turn whose prompt and reply its prompt begins with; "": of none
    known: Count = 0  # tokens of that turn
    rewritten: Count = 0  # replies in the request that no turn gave in this form
    temperature: LiveTemperature = 1.0
    digest: ShortDigest = ""  # of tenant, API and body, by which a retry is known
    key: ShortDigest = ""  # of tenant and idempotency key; "": the request has none
    continues: MaybeId = ""  # the turn, cut, whose tokens its reply begins with; "": none
    skip: EarlySkip | None = None  # why it is not trained, if already known
    secret: SecretIds = ""  # data key under which this is sealed, and what follows of the turn
    older: SecretIds = ""  # other data keys, of the turns before it, that reading its whole prompt takes
    siblings: ShortDigest = ""  # equal for turns of one session with the same prompt and temperature
    tools: ShortDigest = ""  # of the tools that its prompt declares; "": not known
    api_key: MaybeId = ""  # id of the API key of its request; "": not known
    prompt: ShortDigest = ""  # of the conversation before the reply, as its client sends it again; "": not known

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.known + len(self.tokens)


class TurnClaimed(Message):
    """A gateway is about to answer a request that others may be asked for in the same moment; it expires soon.

    The gateway stores it only after the newest message of its subject that it knows: the first one wins the request."""

    claim_id: Id  # digest of owner and idempotency key, or the cut turn that the request continues
    turn_id: Id  # of its first new reply; for a claim itself: it is free, or the client of that turn is connected


class SealedHeaders(Headers):
    """Headers that reading needs."""

    secret: SecretIds = ""


class TurnSampled(Message):
    """Tokens of an unfinished reply, from which another gateway can continue."""

    HEADERS: ClassVar[type[Headers]] = SealedHeaders

    turn_id: Id
    start: Count  # tokens of the reply before these
    tokens: Int32Array  # [T] sampled
    logprobs: Float32Array  # [T] natural log
    versions: Int32Array  # [T] of the weights of each token
    secret: SecretIds = ""  # of its turn


class TurnFinishedHeaders(SealedHeaders, kw_only=True):
    """Headers that deciding needs."""

    turn_id: Id
    session: Id
    finish: Finish
    length: Count = field(name="tokens")
    newest: int = 0
    marked: str = field(default="", name="marks")
    same: ShortDigest = ""
    trial: Count = 0
    canary: bool = False

    @property
    def skip(self) -> SkipReason | None:
        """Why the end of the reply keeps its turn from training; None if nothing does."""
        if self.finish == "gone" or self.finish == "failed":
            return self.finish
        if not self.length:
            return "empty"
        marks = self.marked.split(",")
        if "redacted" in marks:
            return "redacted"
        return "garbage" if "garbage" in marks else None


class TurnFinished(Message):
    """The reply of a turn has ended; a client gets its end after this is stored."""

    HEADERS: ClassVar[type[Headers]] = TurnFinishedHeaders

    turn_id: Id
    session: Id
    finish: Finish
    tokens: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))  # [T] sampled
    logprobs: Float32Array = field(default_factory=lambda: np.empty(0, np.float32))  # [T] natural log
    versions: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))  # [T] of the weights of each token
    history: ShortDigest = ""  # of the conversation up to the end of the reply, as its client sends it again
    marks: list[Mark] = field(default_factory=list)
    same: ShortDigest = ""  # equal for turns under one data key with the same prompt and reply
    trial: Count = 0  # sequence of the weights.canaried in whose comparison it counts; 0: in none
    canary: bool = False  # there: all its tokens are the canary's, and not those of the version that was live
    secret: SecretIds = ""  # of its turn
    routing: Experts | None = None  # where engines return experts; from the last token of the turn before it on

    @property
    def length(self) -> int:
        """Tokens of the reply."""
        return len(self.tokens)

    @property
    def newest(self) -> int:
        """The newest version of its tokens; 0 without tokens."""
        return int(self.versions.max()) if len(self.versions) else 0

    @property
    def marked(self) -> str:
        """Its marks, as its header has them."""
        return ",".join(self.marks)


class TurnShadowed(Message):
    """The reply of another version to the prompt of a turn that has ended: no client gets it, and it is not trained."""

    HEADERS: ClassVar[type[Headers]] = SealedHeaders

    turn_id: Id
    trial: Count  # sequence of the weights.canaried whose version it is
    tokens: Int32Array  # [T] sampled
    secret: SecretIds = ""  # of its turn


class SessionLeftHeaders(Headers):
    """Headers that deciding needs."""

    session_id: Id


class SessionLeft(Message):
    """A client ended its session (`DELETE /v1/sessions/ID`); the keeper of sessions closes it."""

    HEADERS: ClassVar[type[Headers]] = SessionLeftHeaders

    session_id: Id
    tenant: Id


class FeedbackGivenHeaders(SealedHeaders, kw_only=True):
    """Headers that deciding needs."""

    turn_id: Id
    tenant: Id
    score: Score


class FeedbackGiven(Message):
    """A user or a program judged a reply; this overrules a judge until the turn is admitted to training."""

    HEADERS: ClassVar[type[Headers]] = FeedbackGivenHeaders

    feedback_id: Id
    turn_id: Id
    tenant: Id  # of the key that gave it; one that does not own the turn changes nothing
    score: Score
    text: str = ""
    secret: SecretIds = ""  # of its turn


class ReplyKeptHeaders(SealedHeaders, kw_only=True):
    """Headers that deciding needs."""

    turn_id: Id
    tenant: Id


class ReplyKept(Message):
    """A response that its client may retrieve and refer to; the newest of a turn counts, and one without a body deletes
    it."""

    HEADERS: ClassVar[type[Headers]] = ReplyKeptHeaders

    turn_id: Id
    tenant: Id
    body: bytes = b""  # as its client got it, JSON
    input: bytes = b""  # items of its request, a list as JSON; b"": not kept
    secret: SecretIds = ""  # of its turn


class TurnReady(Message):
    """A turn can be judged: work of the judges.

    Readers find prompt, reply and evidence in TURNS by turn ids: `turn.started` of the turn and of its parents, its
    `turn.finished`, and for each turn of `evidence` the `tokens` of its `turn.started`, which were appended after the
    reply (the closing of the reply, messages of the user, results of tools, and the opening of the next reply)."""

    turn_id: Id
    session: Id
    tenant: Id
    evidence: list[Id] = field(default_factory=list)  # turns that continue it; empty: its session ended


class TurnJudgedHeaders(SealedHeaders, kw_only=True):
    """Headers that deciding needs."""

    turn_id: Id
    reward: Real | None = None
    purged: bool = False
    shadow: Real | None = None
    trial: Count = 0


class TurnJudged(Message):
    """The grade of a turn by a judge."""

    HEADERS: ClassVar[type[Headers]] = TurnJudgedHeaders

    turn_id: Id
    reward: Real | None  # None: no valid vote
    judge: str  # name of what voted, with its version
    votes: list[Real | None] = field(default_factory=list)  # None: not valid, or too late
    hints: list[str] = field(default_factory=list)  # what the reply should have minded, by votes of the majority
    purged: bool = False  # its data key is gone
    secret: SecretIds = ""  # of its turn
    shadow: Real | None = None  # the reward of its shadow answer, by the same evidence; None: there is none
    trial: Count = 0  # of that answer


class Sibling(msgspec.Struct):
    """A turn of a group that is admitted to training; its fields mean what those of `turn.admitted` mean."""

    turn_id: Id
    session: Id
    reward: Real
    by: Literal["judge", "user"]
    trial: Count = 0
    canary: bool = False
    version: int = -1
    shadow: Real | None = None


class TurnAdmitted(Message):
    """A turn is to be trained with this reward, as one group with its siblings: replies to the same prompt.

    The prompter issues these groups in the order of this log.
    """

    turn_id: Id
    session: Id
    tenant: Id
    reward: Real
    by: Literal["judge", "user"]
    temperature: LiveTemperature  # that it was sampled at
    secrets: SecretIds = ""  # data keys that reading it takes
    trial: Count = 0  # as in its turn.finished, or of its shadow answer
    canary: bool = False
    version: int = -1  # newest one of its tokens
    shadow: Real | None = None  # reward of its shadow answer, where a judge graded both
    siblings: list[Sibling] = field(default_factory=list)  # the other members of its group, in their order

    @property
    def turns(self) -> list[Sibling]:
        """All members of the group."""
        names = Sibling.__struct_fields__
        return [Sibling(**{name: getattr(self, name) for name in names}), *self.siblings]


class TurnOverruled(Message):
    """The user's grade of a turn that was admitted: its reward, if it comes before the turn is packed."""

    turn_id: Id
    prompt_id: Id
    reward: Real
    member: Count = 0  # of the prompt's group


class TurnSkipped(Message):
    """An end: this turn was served, and is never trained."""

    turn_id: Id
    session: Id
    reason: SkipReason
    trial: Count = 0  # as in its turn.finished, or of its shadow answer
    canary: bool = False
    reward: Real | None = None  # of its grade; of a reply that is garbage the least; None: nothing graded it
    version: int = -1  # newest one of its tokens, of a turn that was graded
    shadow: Real | None = None  # reward of its shadow answer, where a judge graded both


class SessionClosed(Message):
    """A session has ended; its turns that nothing continued are ready, with no evidence."""

    session_id: Id
    reason: Literal["left", "idle"]
    until: Count  # sequence in TURNS of the newest message about it; a later message reopens it


_READERS = ("gateway", "sessions", "rollout", "judge", "monitor")
TURN_STARTED = Topic(TurnStarted, TURNS, ("gateway",), _READERS, key="turn_id")
TURN_CLAIMED = Topic(TurnClaimed, TURNS, ("gateway",), ("gateway", "monitor"), key="claim_id", repeats=True)
TURN_SAMPLED = Topic(TurnSampled, TURNS, ("gateway",), ("gateway", "monitor"), key="turn_id", id=("turn_id", "start"))
TURN_FINISHED = Topic(TurnFinished, TURNS, ("gateway",), (*_READERS, "recorder"), key="turn_id")
TURN_SHADOWED = Topic(TurnShadowed, TURNS, ("gateway",), ("judge", "monitor"), key="turn_id")
SESSION_LEFT = Topic(SessionLeft, TURNS, ("gateway",), ("sessions",), key="session_id", repeats=True)
FEEDBACK_GIVEN = Topic(FeedbackGiven, TURNS, ("gateway",), ("sessions", "recorder"), key="turn_id", id=("feedback_id",))
REPLY_KEPT = Topic(ReplyKept, TURNS, ("gateway",), ("gateway", "monitor"), key="turn_id", repeats=True)
TURN_JUDGED = Topic(TurnJudged, TURNS, ("judge",), ("sessions", "rollout", "recorder"), key="turn_id")
TURN_READY = Topic(TurnReady, SESSIONS, ("sessions",), ("sessions", "judge"), key="turn_id")
TURN_ADMITTED = Topic(TurnAdmitted, SESSIONS, ("sessions",), ("sessions", "prompter", "rollout"), key="turn_id")
TURN_OVERRULED = Topic(
    TurnOverruled, SESSIONS, ("sessions",), ("sessions", "buffer", "monitor"), key="turn_id", repeats=True
)
TURN_SKIPPED = Topic(TurnSkipped, SESSIONS, ("sessions",), ("sessions", "monitor"), key="turn_id")
SESSION_CLOSED = Topic(SessionClosed, SESSIONS, ("sessions",), ("sessions", "monitor"), key="session_id")
