"""Snapshots that are kept with the recorded answers of a trajectory, and the calls of its program before each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec
import numpy as np

from topics.trajectories import Answer
from topics.wire import Int32Array


class EndedCall(NamedTuple):
    """A call of a program that has its answer, as later prompts of its conversation need it."""

    path: str  # of its answer
    ids: Int32Array  # [P] of its prompt
    key: bytes  # of the conversation up to the reply, as `asyncrl.live.conversation.history_key`
    before: bytes  # as `asyncrl.live.conversation.Prompt.key`
    tools: str  # as `asyncrl.live.conversation.Prompt.tools`


class PackedCall(msgspec.Struct, array_like=True):
    """The same as data: a prompt usually begins with the prompt and answer of the call before."""

    path: str
    shared: int  # tokens that both have in common from the first one on
    ids: bytes  # the others, "<i4"
    key: bytes
    before: bytes
    tools: str


class CallPacker:
    """Packs calls, or unpacks them, one after the other."""

    def __init__(self) -> None:
        self._last: Int32Array = np.empty(0, np.int32)  # prompt and answer of the call before

    def pack(self, call: EndedCall, answer: Answer) -> PackedCall:
        """Return a call as data."""
        most = min(len(self._last), len(call.ids))
        differ = np.flatnonzero(self._last[:most] != call.ids[:most])
        shared = int(differ[0]) if len(differ) else most
        self._last = np.concatenate([call.ids, answer.tokens])
        return PackedCall(call.path, shared, call.ids[shared:].tobytes(), call.key, call.before, call.tools)

    def unpack(self, packed: PackedCall, answer: Answer) -> EndedCall:
        """Return the call of its data."""
        ids = np.concatenate([self._last[: packed.shared], np.frombuffer(packed.ids, np.int32)])
        self._last = np.concatenate([ids, answer.tokens])
        return EndedCall(packed.path, ids, packed.key, packed.before, packed.tools)


class SnapshotLog:
    """The snapshots of a trajectory, in their order."""

    def __init__(self, answers: dict[str, Answer], prefix: str, store: Callable[[], Awaitable[None]]) -> None:
        """
        Args:
            answers: recorded ones by call path, to which the snapshots are added.
            prefix: of their paths.
            store: publishes new answers.
        """
        self.answers = answers
        self._prefix, self._store = prefix, store

    def read(self) -> list[bytes]:
        """Return the snapshots that are stored."""
        found: list[bytes] = []
        while (answer := self.answers.get(f"{self._prefix}{len(found)}")) is not None:
            found.append(answer.result)
        return found

    async def append(self, snapshot: bytes) -> None:
        """Store one more."""
        count = len(self.read())
        self.answers[f"{self._prefix}{count}"] = Answer("snapshot", str(count), result=snapshot)
        await self._store()
