"""Sessions of live traffic: which one a request belongs to, and whether its turn may be trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import xxhash

from asyncrl.engine.client import SamplingParams
from asyncrl.live.apis.schema import LiveError
from topics.turns import EarlySkip

SESSION_HEADER = "x-asyncrl-session"
TURN_HEADER = "x-asyncrl-turn"  # of replies: the id of the turn, which feedback names
# In this order: ours, that of OpenClaw-RL's extension, Claude Code's, Codex's.
_NAMED_BY = (SESSION_HEADER, "x-session-id", "x-claude-code-session-id", "session-id")
_KIND_HEADERS = ("x-asyncrl-turn-type", "x-turn-type")  # ours, that of OpenClaw-RL's extension; `side` or `main`
_DONE_HEADERS = ("x-asyncrl-session-done", "x-session-done")
_TRUE = ("1", "true", "yes", "on")
_MOST_CHARS = 256
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,96}")  # a name that a reply repeats unchanged
_MADE = re.compile(r"[0-9a-f]{24}|[0-9a-f]{32}")  # a turn's id, or a digest: it reveals nothing


class Session(NamedTuple):
    """The session that a turn belongs to."""

    id: str  # in messages: digests of the tenant, and of a name that the client gave
    name: str  # the reply repeats it, so that a session that was inferred can be named too
    side: bool = False  # the turn is no part of the conversation: a title, a heartbeat
    done: bool = False  # the client ends the session with this turn


def session_of(tenant: str, headers: Mapping[str, str], turn: str, known: str, *, side: bool = False) -> Session:
    """Return the session of a request: that of its header, else that of the turn it continues, else a new one.

    Args:
        turn: its own id, which names a session that it opens.
        known: id of the session of the turn whose history it continues; "": of none.
        side: what the request says shows that its turn is no part of the conversation; a header overrules that.

    Raises:
        LiveError: its name is longer than allowed.
    """
    named = next((headers[header] for header in _NAMED_BY if headers.get(header)), "")
    if len(named) > _MOST_CHARS:
        words = f"the session's name has {len(named)} characters; at most {_MOST_CHARS} are taken"
        raise LiveError("invalid", words)
    own = named or known.partition("_")[2] or turn
    if named and not _MADE.fullmatch(named):  # what a client calls it may say something, and ids are not sealed
        own = xxhash.xxh3_128_hexdigest(named.encode(errors="replace"))
    kinds = [kind for header in _KIND_HEADERS if (kind := headers.get(header, "").strip().lower())]
    side = "side" in kinds if kinds else side
    done = any(headers.get(header, "").strip().lower() in _TRUE for header in _DONE_HEADERS)
    name = named if _PLAIN.fullmatch(named) else own
    return Session(f"{xxhash.xxh3_64_hexdigest(tenant.encode())}_{own}", name, side, done)


def session_headers(headers: Mapping[str, str]) -> list[str]:
    """Return the headers of a request that name its session and the type of its turn; "" for each that it lacks."""
    return [headers.get(header, "") for header in (*_NAMED_BY, *_KIND_HEADERS)]


def skip_of(sampling: SamplingParams, *, side: bool) -> EarlySkip | None:
    """Return why a turn is served and not trained, None if it may be.

    The trainer computes the whole distribution at the turn's temperature: a greedy reply has no such probability, and
    that of a truncated, penalised or constrained one is another.
    """
    if side:
        return "side"
    if sampling.schema:
        return "constrained"
    penalties = sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty - 1
    if any(penalties) or sampling.logit_bias:
        return "penalised"
    if sampling.temperature == 0:
        return "greedy"
    return "truncated" if sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0 else None
