"""Stored turns as every gateway knows them: histories that a prompt may begin with, replies that a retry takes up."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from asyncrl.live.apis.schema import LiveError, Request
from asyncrl.live.conversation import Conversations, Draft, Prompt, tools_key
from asyncrl.live.difference import History
from asyncrl.live.session_turns import SessionTurns
from asyncrl.live.sessions import session_headers
from asyncrl.live.tenant_keys import owner_in
from topics.turns import TurnFinished, TurnSampled, TurnStarted
from topics.wire import Float32Array, Int32Array

UNDER_WAY = "the request with this Idempotency-Key is running; try again"
_RETRIES = 4096  # ended turns that are kept for retries, at most
Fact: TypeAlias = TurnStarted | TurnSampled | TurnFinished


class Asked(NamedTuple):
    """Digests of a request: a retry has the same ones."""

    digest: str  # of tenant, user, API, session, type of the turn, and body, but whether it is streamed
    key: str = ""  # digest of tenant and idempotency key; "": it has none
    again: bool = False  # the client says that it is a retry
    owner: str = ""  # whose histories and replies it may continue
    choice: int = 0  # number of the reply that is wanted


class Stored(msgspec.Struct):
    """A stored turn."""

    started: TurnStarted
    writer: str  # the gateway that began it
    at_s: float  # when it began, and then when it ended
    tokens: Int32Array  # [T] of its reply
    logprobs: Float32Array  # [T]
    versions: Int32Array  # [T]
    owner: str  # who may continue it
    finish: str = ""  # "": it is unfinished, or was cut with its gateway
    missed: bool = False  # its client was gone before it could be given the end
    continued: bool = False  # another turn continues it

    @property
    def whole(self) -> bool:
        """Return whether its reply is all there."""
        return self.finish in ("stop", "length")

    def answers(self, prompt: Prompt) -> bool:
        """Return whether it has this prompt: a history that is known by now may give another."""
        begun = self.started
        same = (begun.parent, begun.known) == (prompt.parent, prompt.known)
        return same and np.array_equal(begun.tokens, prompt.ids[prompt.known :])


def asked(owner: str, api: str, request: Request, headers: Mapping[str, str], *, messages: bytes) -> list[Asked]:
    """Return what distinguishes a request from others, for each of its choices.

    Some clients repeat a cut stream as a request for a whole reply.

    Args:
        messages: key of its prompt.
    """
    rest = msgspec.structs.replace(request, stream=False, usage=False, messages=[], tools=[], raw=None, input=b"")
    body, again = messages + msgspec.json.encode(rest), headers.get("x-stainless-retry-count", "0") not in ("", "0")
    key, session = headers.get("Idempotency-Key", ""), session_headers(headers)
    return [
        Asked(_digest(owner, api, *session, body, name), key and _digest(owner, key, name), again, owner, number)
        for number, name in enumerate(("", *map(str, range(1, request.choices))))
    ]


class _Known(NamedTuple):
    """A turn whose reply is whole, and all before it."""

    history: History
    key: bytes  # that it is known by
    secrets: str  # data keys of it and the turns before it; "": it is not stored


class TurnLog:
    """A fold of turns, as far back as there is room."""

    def __init__(self, conversations: Conversations, *, most_tokens: int, retry_s: float) -> None:
        self._conversations = conversations  # is given each history
        self._most = most_tokens  # of all histories, prompts and replies
        self._retry_s = retry_s  # seconds for which a retry may continue an ended turn
        self._tokens = 0
        self._open: dict[str, Stored] = {}
        self._known: OrderedDict[str, _Known] = OrderedDict()  # by turn
        self._ended: OrderedDict[str, Stored] = OrderedDict()  # newest by digest of its request
        self._by_key: OrderedDict[str, Stored] = OrderedDict()  # by digest of its idempotency key
        self._sessions = SessionTurns()
        self._held: set[str] = set()  # idempotency keys, and digests of cut requests, of turns that are to begin

    def take(self, fact: Fact, writer: str, at_s: float, *, owner: str = "") -> None:
        """Fold in a message; messages without a known begin are older than the read part.

        Args:
            writer: the gateway that stored it.
            at_s: when it was stored, seconds since 1970.
            owner: who may continue a turn that begins; "": its user.
        """
        if not isinstance(fact, TurnSampled):
            self._sessions.take(fact)
        if isinstance(fact, TurnStarted):
            none = np.empty(0, np.int32)
            owner = owner or owner_in(fact.secret) or fact.tenant
            turn = Stored(fact, writer, at_s, none, np.empty(0, np.float32), none, owner)
            self._open[fact.turn_id] = turn
            if fact.key:
                self._by_key[fact.key] = turn
            cut = self._ended.get(fact.digest) if fact.continues else None
            if cut is not None and cut.started.turn_id == fact.continues:
                del self._ended[fact.digest]  # once: this turn is continued now
            elif (cut := self._open.get(fact.continues)) is not None:  # its gateway is gone, and its end comes later
                cut.continued = True
            return
        if (found := self._open.get(fact.turn_id)) is None:
            return
        if isinstance(fact, TurnSampled):
            if fact.start == len(found.tokens):  # else one before it was lost
                found.tokens = np.concatenate([found.tokens, fact.tokens])
                found.logprobs = np.concatenate([found.logprobs, fact.logprobs])
                found.versions = np.concatenate([found.versions, fact.versions])
            return
        del self._open[fact.turn_id]
        found.tokens, found.logprobs, found.versions = fact.tokens, fact.logprobs, fact.versions
        # A reply that another gateway stored redacted is not the one that its client got.
        found.finish, found.at_s = "failed" if "redacted" in fact.marks else fact.finish, at_s
        self._end(found, fact.history)

    def _end(self, turn: Stored, history: str) -> None:
        started = turn.started
        if started.digest and turn.finish != "failed" and not turn.continued:
            self._ended[started.digest] = turn
            self._ended.move_to_end(started.digest)
        for kept in (self._ended, self._by_key):
            while kept and (len(kept) > _RETRIES or self._over(next(iter(kept.values())), turn.at_s)):
                kept.popitem(last=False)
        parent = self._known.get(started.parent)
        before = np.empty(0, np.int32) if not started.parent else None if parent is None else parent.history.ids
        if not history or before is None or len(before) != started.known:
            return
        ids, key = np.concatenate([before, started.tokens, turn.tokens]), bytes.fromhex(history)
        secrets = ",".join(filter(None, (started.secret, started.older)))
        asked = bytes.fromhex(started.prompt)
        known = History(
            started.turn_id, ids, len(ids) - len(turn.tokens), started.session, started.tools, asked, turn.owner
        )
        self._known[started.turn_id] = _Known(known, key, secrets)
        self._tokens += len(ids)
        while self._tokens > self._most and len(self._known) > 1:
            self._tokens -= len(self._known.popitem(last=False)[1].history.ids)
        self._conversations.put(key, known)

    def turns_of(self, session: str) -> list[str]:
        """Return the stored turns of a session, in their order: those that have a whole reply or no end yet."""
        return self._sessions.of(session)

    def secrets_of(self, turn: str) -> str | None:
        """Return the data keys for reading a turn; None if it is not known (any more)."""
        known = self._known.get(turn)
        return None if known is None else known.secrets

    def purge(self, secrets: set[str]) -> None:
        """Forget all that is sealed under these data keys."""
        gone = {name for name, known in self._known.items() if not secrets.isdisjoint(known.secrets.split(","))}
        self._tokens -= sum(len(self._known.pop(name).history.ids) for name in gone)
        self._conversations.forget(gone)
        self._sessions.purge(secrets)
        for kept in (self._open, self._ended, self._by_key):
            for name in [name for name, turn in kept.items() if not secrets.isdisjoint(secrets_in(turn.started))]:
                del kept[name]

    def _over(self, turn: Stored, now_s: float) -> bool:
        """Return whether no retry can continue a turn any more: it need not hold its prompt."""
        return bool(turn.finish) and now_s - turn.at_s > self._retry_s

    def draft(self, request: Request, owner: str) -> Draft | None:
        """Return the function that writes the prompt of a request, as `Conversations.draft` does; None if it names an
        earlier turn that this owner does not have.

        Raises:
            LiveError: it has tools, and others than the prompt of that turn declares: nothing would tell them.
        """
        if request.raw is not None:
            return self._conversations.raw(request.raw, owner, special=request.special)
        if not request.previous:
            return self._conversations.draft(request.messages, owner, request.tools, request.variables)
        known = self._known.get(request.previous)
        if known is None or known.history.owner != owner:
            return None
        if request.tools and known.history.tools not in ("", tools_key(request.tools)):
            words = "are not those that the conversation of previous_response_id began with; send all messages"
            raise LiveError("invalid", f"tools {words}", field="tools")
        return self._conversations.following(known.history, known.key, request.messages, request.variables)

    def open_of(self, *writers: str) -> list[Stored]:
        """Return the unfinished turns of these gateways."""
        return [turn for turn in self._open.values() if turn.writer in writers]

    def under_way(self, requests: Sequence[Asked], of: Callable[[str], bool]) -> list[str]:
        """Return the known unfinished turns of equal requests, of these gateways."""
        digests = {request.digest for request in requests}
        equal = [turn for turn in self._open.values() if turn.started.digest in digests]
        return [turn.started.turn_id for turn in equal if of(turn.writer)]

    def end(self, turns: Collection[str], now_s: float) -> None:
        """Take turns as cut with their gateway, before the next one of its name says so."""
        for turn in [self._open.pop(turn) for turn in turns if turn in self._open]:
            turn.finish, turn.at_s = "gone", now_s
            self._end(turn, "")

    def has_begun(self, turn: str) -> bool:
        """Return whether a turn is known to have begun; of ended ones those that a retry may continue."""
        ended = (one for kept in (self._by_key, self._ended) for one in kept.values())
        return turn in self._open or any(one.started.turn_id == turn for one in ended)

    def given(self, digest: str, turn: str, *, missed: bool) -> None:
        """Take note of whether the client of a turn was there for the end of its reply."""
        found = self._ended.get(digest)
        if found is not None and found.started.turn_id == turn:
            found.missed = missed

    def retried(self, request: Asked, now_s: float) -> Stored | None:
        """Return the turn that a request continues, a cut one once; None for a new one.

        A request with the idempotency key of an earlier one gets that one's reply. A request whose client says that it
        is a retry gets the reply of the newest equal one, whole or cut; any other goes on with an equal one that was
        cut, or gets one whose client was gone at its end: a reply that a client has got is not given again unasked,
        and one to a request with a key waits for that key.

        Args:
            now_s: seconds since 1970.

        Raises:
            LiveError: another request had this idempotency key, or the one that has it is unfinished.
        """
        found = self._by_key.get(request.key) if request.key else None
        if found is not None and found.started.digest != request.digest:
            words = "the Idempotency-Key was sent with another request; send a new key"
            raise LiveError("invalid", words, field="Idempotency-Key")
        if request.key in self._held or (found is not None and not found.finish):
            raise LiveError("overloaded", UNDER_WAY)
        if found is None:
            found = self._ended.get(request.digest)
            if found is None:
                return None
            keyed = request.key or found.started.key
            if not (request.again or ((found.finish == "gone" or found.missed) and not keyed)):
                return None
        taken_up = not found.whole and request.digest in self._held
        return None if self._over(found, now_s) or found.finish == "failed" or taken_up else found

    @contextmanager
    def held(self, names: Collection[str]) -> Iterator[None]:
        """Hold idempotency keys, and digests of cut requests, for turns whose begin is not known yet."""
        mine = {*names} - {""}
        self._held |= mine
        try:
            yield
        finally:
            self._held -= mine


def secrets_in(started: TurnStarted) -> list[str]:
    """Return the data keys of a turn and the turns before it."""
    return f"{started.secret},{started.older}".strip(",").split(",")


def _digest(*parts: str | bytes) -> str:
    made = hashlib.sha256()
    for part in parts:
        raw = part.encode(errors="replace") if isinstance(part, str) else part
        made.update(len(raw).to_bytes(8) + raw)
    return made.hexdigest()[:32]
