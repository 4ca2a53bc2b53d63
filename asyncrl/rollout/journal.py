"""The journal of a rollout: what its context answered, so that the same function can run again on any worker.

A rollout function is replayed from its start. Each call finds its recorded answer by its path: the number of the call
in its branch; every asyncio task that the function creates is a separate branch, numbered at its creation. Answers
depend on paths only, never on which of two parallel calls came back first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, Token, copy_context
from copy import copy
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from asyncrl.errors import AsyncRLError
from asyncrl.rollout.snapshots import SnapshotLog
from topics.payload_refs import Experts
from topics.trajectories import Answer
from topics.wire import Int32Array, WireError


class Diverged(AsyncRLError):
    """A replayed rollout function asked something else than it did the first time."""


class _Branch:
    """The calls of one asyncio task of a rollout function."""

    __slots__ = ("calls", "children", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.calls = 0
        self.children = 0

    def next_call(self) -> str:
        path = f"{self.path}{self.calls}"
        self.calls += 1
        return path

    def child(self) -> _Branch:
        branch = _Branch(f"{self.path}{self.calls}.{self.children}/")
        self.children += 1
        return branch


_BRANCH: ContextVar[_Branch | None] = ContextVar("rollout_branch", default=None)


def branch_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Give every task that a rollout function creates on this loop a separate branch, in the order of creation."""

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, context: Context | None = None) -> asyncio.Task[Any]:
        parent = _BRANCH.get()
        if parent is not None:
            context = copy_context() if context is None else context
            context.run(_BRANCH.set, parent.child())
        return asyncio.Task(coroutine, loop=loop, context=context)

    loop.set_task_factory(factory)


@contextmanager
def outside() -> Iterator[None]:
    """Mark code that is not the rollout function's: tasks made inside are no branches."""
    token = _BRANCH.set(None)
    try:
        yield
    finally:
        _BRANCH.reset(token)


def call_order(path: str) -> list[int]:
    """Sorting key of call paths: `0`, `1`, `1.0/0`, `1.1/0`, `2`."""
    return [int(number) for number in path.replace("/", ".").split(".")]


def digest_of(*inputs: Any) -> str:
    """xxh3 of a call's inputs, hex."""
    digest = xxhash.xxh3_64()
    for value in inputs:
        digest.update(value.tobytes() if isinstance(value, np.ndarray) else msgspec.msgpack.encode(value))
        digest.update(b"\x00")
    return digest.hexdigest()


def seed_of_call(seed: int, path: str) -> int:
    """Return the seed of a generation: two calls with the same tokens must not draw the same answer."""
    return xxhash.xxh3_64_intdigest(f"{seed}:{path}".encode()) >> 1


class Journal:
    """Recorded answers by call path, in the order in which the calls were first made."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self._published: dict[str, _State] = {}

    def extend(self, recording: dict[str, Answer]) -> None:
        """Continue it with the parts published later.

        Raises:
            WireError: the recording does not continue it; nothing of it was taken.
        """
        continued = {path: _continued(path, self.answers.get(path), answer) for path, answer in recording.items()}
        self.answers |= continued
        self._published |= {path: _state_of(answer) for path, answer in continued.items()}

    def begin(self) -> Token[_Branch | None]:
        """Start (or start again) at the first call, in the task that calls this."""
        return _BRANCH.set(_Branch(""))

    @staticmethod
    def end(token: Token[_Branch | None]) -> None:
        """Leave the rollout."""
        _BRANCH.reset(token)

    def ask(self, call: str, inputs: str) -> tuple[str, Answer]:
        """Path and recorded answer of the call that is being made now; a new, open answer if there is none.

        Raises:
            Diverged: the recording at this place is of another call, or of other inputs.
        """
        branch = _BRANCH.get()
        if branch is None:
            raise Diverged(f"{call} was asked outside of the rollout function; its context ends with it")
        path = branch.next_call()
        answer = self.answers.get(path)
        if answer is None:
            answer = self.answers[path] = Answer(call, inputs, done=False)
        elif answer.call != call or answer.inputs != inputs:
            raise Diverged(
                f"call {path} is {call}({inputs}) but was {answer.call}({answer.inputs}) before; a rollout function "
                "must ask the same again: take clock and randomness from the context, mark other tools replay='journal'"
            )
        return path, answer

    def by_content(self, *, again: bool = False) -> ContentCalls:
        """Calls from here on that no order identifies.

        Args:
            again: no call gets an answer that an earlier run of the function has recorded.

        Raises:
            Diverged: this is called outside of the rollout function.
        """
        branch = _BRANCH.get()
        if branch is None:
            raise Diverged("an endpoint was asked for outside of the rollout function; its context ends with it")
        return ContentCalls(self.answers, branch.child().path, again=again)

    def snapshots(self, store: Callable[[], Awaitable[None]]) -> SnapshotLog:
        """Snapshots of the trajectory, which are stored as answers are.

        Raises:
            Diverged: this is called outside of the rollout function.
        """
        branch = _BRANCH.get()
        if branch is None:
            raise Diverged("snapshots were asked for outside of the rollout function; its context ends with it")
        return SnapshotLog(self.answers, branch.child().path, store)

    def news(self) -> dict[str, Answer]:
        """Return the unpublished part of the answers, each from its first unpublished token on."""
        news: dict[str, Answer] = {}
        for path, answer in self.answers.items():
            published = self._published.get(path, _State(0, 0, done=False))
            if _state_of(answer) != published:
                part = news[path] = copy(answer)
                part.start = start = published.tokens
                part.tokens, part.logprobs = answer.tokens[start:], answer.logprobs[start:]
                part.versions = _shortened(answer.versions[start:])
                if answer.routing is not None:
                    rows = answer.routing.rows[published.rows * answer.routing.width :]
                    part.routing = msgspec.structs.replace(answer.routing, rows=rows, before=published.rows)
        return news

    def published(self, news: dict[str, Answer]) -> None:
        """Note that the result of `news` is stored."""
        self._published |= {path: _state_of(answer) for path, answer in news.items()}

    @property
    def tokens(self) -> int:
        """Tokens sampled so far."""
        return sum(len(answer.tokens) for answer in self.answers.values())


class ContentCalls:
    """Calls of a program that asks in any order: the k-th call with equal inputs gets the k-th recorded answer."""

    def __init__(self, answers: dict[str, Answer], prefix: str, *, again: bool) -> None:
        self._answers = answers
        self._prefix = prefix  # of their paths, which end with their numbers
        self._given: set[str] = {path for path in answers if again and path.startswith(prefix)}

    def ask(self, call: str, inputs: str) -> tuple[str, Answer]:
        """Path and recorded answer of a call; a new, open answer if there is none."""
        mine = sorted((path for path in self._answers if path.startswith(self._prefix)), key=call_order)
        equal = (path for path in mine if self._answers[path].inputs == inputs and path not in self._given)
        path = next(equal, "")
        if not path:
            path = f"{self._prefix}{call_order(mine[-1])[-1] + 1 if mine else 0}"
            self._answers[path] = Answer(call, inputs, done=False)
        self._given.add(path)
        return path, self._answers[path]

    def take(self, path: str) -> Answer:
        """Return an answer that an earlier run of the program got, and that is not asked for again."""
        self._given.add(path)
        return self._answers[path]

    def withdraw(self, path: str) -> None:
        """Give the answer to the next equal call: the client of this one has left before its answer was whole."""
        self._given.discard(path)


class _State(NamedTuple):
    """The length of an answer."""

    tokens: int
    rows: int  # of experts
    done: bool


def _state_of(answer: Answer) -> _State:
    """Return the length of an answer so far, including its published parts."""
    rows = answer.routing.end - answer.routing.first if answer.routing is not None else 0
    return _State(answer.start + len(answer.tokens), rows, answer.done)


def _shortened(versions: Int32Array) -> Int32Array:
    """Return one number where all are the same: a third fewer bytes."""
    return versions[:1] if len(versions) and np.all(versions == versions[0]) else versions


def _continued(path: str, known: Answer | None, news: Answer) -> Answer:
    """An answer after one more recording of it."""
    length, count = 0 if known is None else len(known.tokens), len(news.tokens)
    if news.start != length:
        raise WireError(f"progress of call {path} begins at token {news.start}, but {length} were published before")
    versions = np.repeat(news.versions, count) if len(news.versions) == 1 else news.versions
    if len(versions) != count or len(news.logprobs) != count:
        raise WireError(f"call {path}: {count} tokens, {len(news.logprobs)} log-probs, {len(news.versions)} versions")
    before = known or Answer(news.call, news.inputs)
    return msgspec.structs.replace(
        news,
        start=0,
        tokens=np.concatenate([before.tokens, news.tokens]),
        logprobs=np.concatenate([before.logprobs, news.logprobs]),
        versions=np.concatenate([before.versions, versions]),
        routing=_rows_continued(path, before.routing, news.routing),
    )


def _rows_continued(path: str, known: Experts | None, news: Experts | None) -> Experts | None:
    if news is None:
        return known
    before = known or msgspec.structs.replace(news, rows=b"", before=0)
    found, expected = (news.width, news.follows, news.first), (before.width, before.follows, before.first)
    if found != expected or before.first + news.before != before.end:
        rows = before.end - before.first
        raise WireError(f"call {path}: experts {found} behind {news.before} rows, expected {expected} behind {rows}")
    return msgspec.structs.replace(before, rows=before.rows + news.rows)
