"""Tokens in, tokens out: the prompt of a conversation's next turn is the sampled tokens so far plus the new text.

A reply is never encoded again: the ids of the longest known history are taken as they were sent and sampled, and the
template writes what follows. The text after a reply is found by difference: a mark replaces the reply, and the text
that the template writes after the mark is encoded. That is exact if the text begins with an end-of-sequence token,
because no token crosses a special one; other templates are refused at the start.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import xxhash

from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.live.escape_special_tokens import Quoted
from topics.wire import Int32Array

_MARK = "\ufdd2"  # in the place of a reply; Unicode keeps it from ever standing for a character
_QUESTION = {"role": "user", "content": "a"}
_REPLY = {"role": "assistant", "content": _MARK}
_ROLES = ("user", "tool", "system")  # whose messages may follow a reply
_PROBES = (  # histories before a reply, which what follows it may not depend on
    [_QUESTION],
    [{"role": "system", "content": "a"}, _QUESTION],
    [_QUESTION, {"role": "assistant", "content": "a"}, _QUESTION],
)

_UNSAID = frozenset(("reasoning_content", "turn"))  # keys of a message that a history is not known by
_SIBLINGS = 8  # replies with equal text after the same messages, whose ids are kept

_REMEMBERED = 65_536  # beginnings of conversations

_ENCODER, _PLAIN = msgspec.json.Encoder(order="deterministic"), msgspec.json.Encoder()

Message = dict[str, Any]


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


class Seam:
    """Writes what follows a reply, by difference."""

    name = "difference"

    def __init__(self, tokenizer: TaskTokenizer, reason: str = "", *, most: int | None = None) -> None:
        """
        Args:
            reason: for which it was chosen.
            most: tokens of a prompt; None: any.

        Raises:
            TokenizerError: the text after a reply is ambiguous, or need not begin with a token.
        """
        self.reason = reason
        self._tokenizer = tokenizer
        self._quoted = Quoted(tokenizer, most=most)
        self._ends = {end: tokenizer.decode_all([end]) for end in tokenizer.eos_ids}
        self._base = next((base for base in _PROBES if self._takes(base)), _PROBES[0])
        text = self._behind(self._base, [_QUESTION])
        if not any(text.startswith(end) for end in self._ends.values()):
            raise TokenizerError(
                f"the chat template writes {text[:40]!r} behind a reply; expected an end-of-sequence token first "
                f"({', '.join(self._ends.values()) or 'the model names none'}), or tokens could reach over the seam: "
                "end the assistant's text with eos_token in the template"
            )
        for base in _PROBES:
            if self._takes(base) and self._behind(base, [_QUESTION]) != text:
                raise TokenizerError(
                    "the chat template writes what follows a reply in another way when more stands before it; "
                    "a conversation cannot be continued without writing it anew: use another template"
                )
        firsts = {self._first(text) for role in _ROLES if (text := self._follows(role))}
        self._openers = firsts if len(firsts) > 1 else set[str]()  # ends that begin the message of one role (GLM)

    def whole(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Int32Array:
        """Return the tokens of a conversation of which nothing is known: [P] int32; raises `TooLong` as `after`."""
        quoted = self._quoted
        return quoted.encode(self._tokenizer.chat_text(quoted.messages(messages), quoted.tools(tools)))

    def after(self, history: History, messages: Sequence[Message]) -> Int32Array:
        """Return the tokens of a prompt: those of a history, and of the messages that follow its last reply.

        Args:
            history: a reply that did not end by itself (its limit, a stop sequence) is closed here.
            messages: at least one.

        Raises:
            TooLong: they have certainly more tokens than a prompt may have.
        """
        text, ids = self._behind(self._base, messages), history.ids
        ended, written = self._ends.get(int(ids[-1]), ""), self._first(text)
        # The end that was sampled may be another than the template writes.
        if ended and (ended == written or written not in self._openers):
            text = text[len(written) :]
        return np.concatenate([ids, self._quoted.encode(text)])

    def _behind(self, base: Sequence[Message], messages: Sequence[Message]) -> str:
        """Return the text from the end of a reply on, up to where the next one begins."""
        text = self._tokenizer.chat_text([*base, _REPLY, *self._quoted.messages(messages)])
        before, found, behind = text.partition(_MARK)
        if not found or _MARK in behind:
            raise TokenizerError(
                f"the chat template writes a reply {text.count(_MARK)} times, expected once: {before[-40:]!r}"
            )
        return behind

    def _first(self, text: str) -> str:
        """Return the end of sequence that a text begins with; "" for any other text."""
        return next((end for end in self._ends.values() if text.startswith(end)), "")

    def _follows(self, role: str) -> str:
        """Return the text after a reply that a message of a role follows; "" if the template refuses it."""
        try:
            return self._behind(self._base, [{"role": role, "content": "a", "tool_call_id": "a"}])
        except TokenizerError:
            return ""

    def _takes(self, base: Sequence[Message]) -> bool:
        """Return whether the template takes such a history: some refuse a system message."""
        try:
            self._behind(base, [_QUESTION])
        except TokenizerError:
            return False
        return True


class History(NamedTuple):
    """Tokens of a conversation up to the end of a reply."""

    turn: str  # of that reply
    ids: Int32Array  # [T] prompt and reply
    prompt: int  # how many of them are the prompt's
    session: str = ""  # of that turn
    tools: str = ""  # digest of those that its prompt declares; "": not known


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

    def __init__(self, seam: Seam, *, most_tokens: int) -> None:
        self._seam = seam
        self._most = most_tokens
        self._tokens = 0
        self._remembered = _Remembered()
        self._known: OrderedDict[bytes, dict[str, History]] = OrderedDict()  # by turn: some differ in reasoning alone

    def prompt(self, messages: Sequence[Message], owner: str = "", tools: Sequence[Message] = ()) -> Prompt:
        """Return the tokens of a request's prompt; arguments and errors as of `draft`."""
        return self.draft(messages, owner, tools)()

    def draft(self, messages: Sequence[Message], owner: str = "", tools: Sequence[Message] = ()) -> Draft:
        """Return what writes and encodes a request's prompt, which takes long where much of it is new.

        Args:
            messages: roles and texts; the last is not the assistant's.
            owner: whose histories it may continue.
            tools: that the reply may call.

        Raises:
            TokenizerError, from the returned function: the template refuses them.
        """
        root = root_of(owner, tools)
        ends = self._remembered.ends(messages, root)
        found = self._newest(ends)
        if found is None and len(ends) < len(messages):
            ends = list(_keys(messages, root))
            found = self._newest(ends)
        whole = ends[-1].key
        if found is None:
            rewritten, declared = _replies(messages), tools_key(tools)
            return lambda: Prompt(self._seam.whole(messages, tools), rewritten=rewritten, key=whole, tools=declared)
        return self._behind(found[0], messages[found[1].messages :], whole)

    def _behind(self, history: History, messages: Sequence[Message], key: bytes) -> Draft:
        """Return what writes a prompt that follows a history; `key` is that of all messages."""

        def write() -> Prompt:
            ids = self._seam.after(history, messages)
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

    def following(self, history: History, key: bytes, messages: Sequence[Message]) -> Draft:
        """Return what writes a prompt that follows a history whose messages the request leaves out; see `draft`."""
        *_, end = _keys(messages, key)
        return self._behind(history, messages, end.key)

    def put(self, key: bytes, history: History) -> None:
        """Keep a history.

        Args:
            key: as `history_key` gives it.
        """
        siblings = self._known.setdefault(key, {})
        self._known.move_to_end(key)
        self._drop(siblings, [history.turn])
        self._drop(siblings, list(siblings)[: 1 - _SIBLINGS])
        siblings[history.turn] = history
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
            if turn in siblings:
                self._tokens -= len(siblings.pop(turn).ids)


def history_key(reply: Message, before: bytes) -> bytes:
    """Return what a conversation is known by.

    Args:
        reply: as the client got it.
        before: key of the request's prompt.
    """
    return _behind(before, reply)


def root_of(owner: str = "", tools: Sequence[Message] = ()) -> bytes:
    """Return what a conversation without messages is known by.

    Args:
        owner: who may continue it.
        tools: that its replies may call.
    """
    return _digest(_ENCODER.encode([owner, tools]))


def tools_key(tools: Sequence[Message]) -> str:
    """Return what tools of a request are known by; there may be none."""
    return _digest(_ENCODER.encode(tools)).hex()


def _replies(messages: Sequence[Message]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def _keys(messages: Sequence[Message], key: bytes) -> Iterator[_End]:
    """Return each beginning of a conversation; each message is read once."""
    for count, message in enumerate(messages, 1):
        key = _behind(key, message)
        yield _End(count, key, message["role"] == "assistant", message.get("turn", ""))


def _behind(key: bytes, message: Message) -> bytes:
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
