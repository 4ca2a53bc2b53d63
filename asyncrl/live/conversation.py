"""Tokens in, tokens out: the prompt of a conversation's next turn is the sampled tokens so far plus the new text.

A reply is never encoded again: the ids of the longest known history are taken as they were sent and sampled, and the
template writes what follows (`asyncrl/live/difference.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple, TypeAlias

import msgspec
import xxhash

from asyncrl.live.difference import History, Message, TurnBoundary
from topics.wire import Int32Array

_UNSAID = frozenset(("reasoning_content", "turn"))  # keys of a message that a history is not known by
_SIBLINGS = 8  # replies with equal text after the same messages, whose ids are kept
_CALL = re.compile(r"call_([0-9a-f]{24})_[0-9]")  # the id of a call, with its turn

_REMEMBERED = 65_536  # beginnings of conversations

_ENCODER, _PLAIN = msgspec.json.Encoder(order="deterministic"), msgspec.json.Encoder()


class Prompt(NamedTuple):
    """The tokens of a turn's prompt."""

    ids: Int32Array  # [P]
    parent: str = ""  # the turn whose tokens it begins with, prompt and reply; "": of none
    known: int = 0  # ids of that turn
    rewritten: int = 0  # replies in the request that no turn gave in this form: edited, compacted or foreign
    session: str = ""  # of that turn
    key: bytes = b""  # digest of all messages before the reply
    begun: str = ""  # text of the reply that the ids end with: of a call that is forced
    tools: str = ""  # digest of the tools that it declares; "": not known


Draft: TypeAlias = Callable[[], Prompt]  # may be called in a thread


class _End(NamedTuple):
    """A beginning of a conversation."""

    messages: int  # that it has
    key: bytes  # digest of them
    reply: bool  # the last one is a reply
    turn: str  # that the client says gave it; "": it does not say


class _Remembered:
    """Keys of recent beginnings, by their text, so that only the end of a long conversation is hashed again.

    The text is compared by a fast digest that a user could forge only within the user's own conversations.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, bytes] = OrderedDict()

    def ends(self, messages: Sequence[Message], root: bytes) -> list[_End]:
        """Return the beginnings of a conversation from the newest remembered one on: all, if none is remembered."""
        backwards = (number for number in range(len(messages), 0, -1) if messages[number - 1]["role"] == "assistant")
        replies = list(islice(backwards, 2))  # after the newest one, and after the part that the previous request had
        text, begin, texts = xxhash.xxh3_128(), 0, []
        for end in reversed(replies):
            text.update(_PLAIN.encode_lines(_visible(messages[begin:end])))
            texts.append(root + text.digest())
            begin = end
        ends: list[_End] = []
        for end, known in zip(replies, reversed(texts), strict=False):
            if (key := self._keys.get(known)) is not None:
                ends = [_End(end, key, True, messages[end - 1].get("turn", ""))]
                break
        begin, key = (ends[0].messages, ends[0].key) if ends else (0, root)
        ends += (one._replace(messages=begin + one.messages) for one in _keys(messages[begin:], key))
        if replies:
            self._keys[texts[-1]] = next(one.key for one in ends if one.messages == replies[0])
            if len(self._keys) > _REMEMBERED:
                self._keys.popitem(last=False)
        return ends


class Conversations:
    """Known histories by their messages, the newest ones: forgotten ones are written again from their text."""

    def __init__(self, seam: TurnBoundary, *, most_tokens: int) -> None:
        self._seam = seam
        self._most = most_tokens
        self._tokens = 0
        self._remembered = _Remembered()
        self._known: OrderedDict[bytes, dict[str, History]] = OrderedDict()  # by turn: some differ in reasoning alone
        self._asked: dict[bytes, dict[str, History]] = {}  # the same by the key of the prompt
        self._turns: dict[str, History] = {}

    def draft(
        self,
        messages: Sequence[Message],
        owner: str = "",
        tools: Sequence[Message] = (),
        variables: Mapping[str, Any] = {},
    ) -> Draft:
        """Return what writes and encodes a request's prompt, which takes long where much of it is new.

        Args:
            messages: roles and texts; the last is not the assistant's.
            owner: whose histories it may continue.
            tools: that the reply may call.
            variables: of the template.

        Raises:
            TokenizerError, from the returned function, or here if variables are given: the template refuses them.
        """
        known_by = variables if variables and self._seam.changes_history(variables) else {}
        root = root_of(owner, tools, known_by)
        ends = self._remembered.ends(messages, root)
        found = self._newest(ends)
        if found is None and len(ends) < len(messages):
            ends = list(_keys(messages, root))
            found = self._newest(ends)
        whole = ends[-1].key
        if found is None:
            rewritten, declared = _replies(messages), tools_key(tools)
            session = self._session(messages, ends, owner) if rewritten else ""
            return lambda: Prompt(
                self._seam.whole(messages, tools, variables),
                rewritten=rewritten,
                session=session,
                key=whole,
                tools=declared,
            )
        return self._continued(found[0], messages[found[1].messages :], whole, variables)

    def raw(self, prompt: str | list[int], owner: str, *, special: bool) -> Draft:
        """Return what encodes a prompt that no template writes; arguments as of `TurnBoundary.raw`, and the owner."""
        key = _digest(_ENCODER.encode([owner, prompt, special]))
        return lambda: Prompt(self._seam.raw(prompt, special=special), key=key)

    def _continued(
        self, history: History, messages: Sequence[Message], key: bytes, variables: Mapping[str, Any]
    ) -> Draft:
        """Return what writes a prompt that follows a history; `key` is that of all messages."""

        def write() -> Prompt:
            ids = self._seam.after(history, messages, variables)
            known, rewritten = len(history.ids), _replies(messages)
            return Prompt(ids, history.turn, known, rewritten, history.session, key, tools=history.tools)

        return write

    def _newest(self, ends: Sequence[_End]) -> tuple[History, _End] | None:
        """Return the longest known history among beginnings of a conversation."""
        for end in reversed(ends):
            if end.reply and (siblings := self._known.get(end.key)) is not None:
                self._known.move_to_end(end.key)
                # A reference of its client tells siblings apart; it finds no history whose messages are others.
                return siblings.get(end.turn) or next(reversed(siblings.values())), end
        return None

    def _session(self, messages: Sequence[Message], ends: Sequence[_End], owner: str) -> str:
        """Return the session of a conversation whose replies the client has rewritten; "" if it is not known.

        The id of a call names its turn. Else the messages before a reply name the turns that answered them: those of
        one session, or the newest whose text is part of the reply.
        """
        for turn in _called(messages):
            if (history := self._turns.get(turn)) is not None and history.owner == owner:
                return history.session
        for before, end in reversed([*pairwise(ends)]):
            if not (end.reply and (asked := self._asked.get(before.key))):
                continue
            if len({history.session for history in asked.values()}) == 1:
                return next(iter(asked.values())).session
            said = messages[end.messages - 1]["content"]
            for history in reversed(asked.values()):
                text = self._seam.text(history.ids[history.prompt :]).strip()
                if text and text in said:
                    return history.session
        return ""

    def following(
        self, history: History, key: bytes, messages: Sequence[Message], variables: Mapping[str, Any] = {}
    ) -> Draft:
        """Return what writes a prompt that follows a history whose messages the request leaves out; see `draft`."""
        *_, end = _keys(messages, key)
        return self._continued(history, messages, end.key, variables)

    def put(self, key: bytes, history: History) -> None:
        """Keep a history.

        Args:
            key: as `history_key` gives it.
        """
        siblings = self._known.setdefault(key, {})
        self._known.move_to_end(key)
        self._drop(siblings, [history.turn])
        self._drop(siblings, list(siblings)[: 1 - _SIBLINGS])
        siblings[history.turn] = self._turns[history.turn] = history
        self._asked.setdefault(history.before, {})[history.turn] = history
        self._tokens += len(history.ids)
        while self._tokens > self._most and len(self._known) > 1:
            self._drop(oldest := self._known.popitem(last=False)[1], list(oldest))

    def forget(self, turns: Collection[str]) -> None:
        """Keep the histories of these turns no more."""
        for key in [key for key, siblings in self._known.items() if not siblings.keys().isdisjoint(turns)]:
            siblings = self._known[key]
            self._drop(siblings, [turn for turn in siblings if turn in turns])
            if not siblings:
                del self._known[key]

    def _drop(self, siblings: dict[str, History], turns: Sequence[str]) -> None:
        for turn in turns:
            if (history := siblings.pop(turn, None)) is None:
                continue
            self._tokens -= len(history.ids)
            self._turns.pop(turn, None)
            asked = self._asked[history.before]
            asked.pop(turn, None)
            if not asked:
                del self._asked[history.before]


def history_key(reply: Message, before: bytes) -> bytes:
    """Return what a conversation is known by.

    Args:
        reply: as the client got it.
        before: key of the request's prompt.
    """
    return _extended(before, reply)


def root_of(owner: str = "", tools: Sequence[Message] = (), variables: Mapping[str, Any] = {}) -> bytes:
    """Return what a conversation without messages is known by.

    Args:
        owner: who may continue it.
        tools: that its replies may call.
        variables: of the template, where they change the text before a reply.
    """
    return _digest(_ENCODER.encode([owner, tools, variables] if variables else [owner, tools]))


def tools_key(tools: Sequence[Message]) -> str:
    """Return what tools of a request are known by; there may be none."""
    return _digest(_ENCODER.encode(tools)).hex()


def _called(messages: Sequence[Message]) -> Iterator[str]:
    """Return the turns that the ids of calls in messages name, the newest first; clients write ids into texts, too."""
    for message in reversed(messages):
        ids = [message.get("tool_call_id", ""), *(call.get("id", "") for call in message.get("tool_calls", ()))]
        if message["role"] == "assistant":
            ids.append(message["content"])
        yield from reversed(_CALL.findall(" ".join(ids)))


def _replies(messages: Sequence[Message]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def _keys(messages: Sequence[Message], key: bytes) -> Iterator[_End]:
    """Return each beginning of a conversation; each message is read once."""
    for count, message in enumerate(messages, 1):
        key = _extended(key, message)
        yield _End(count, key, message["role"] == "assistant", message.get("turn", ""))


def _extended(key: bytes, message: Message) -> bytes:
    """Return the digest of a conversation with one more message: reasoning, which some clients leave out, aside."""
    return _digest(key + _ENCODER.encode(*_visible([message])))


def _visible(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages with the fields that their texts show."""
    if all(map(_UNSAID.isdisjoint, messages)):
        return messages
    return [{name: value for name, value in message.items() if name not in _UNSAID} for message in messages]


def _digest(raw: bytes) -> bytes:
    """Return a digest for which other messages cannot be found: one tenant's must never be known by another's key."""
    return hashlib.sha256(raw).digest()[:16]
