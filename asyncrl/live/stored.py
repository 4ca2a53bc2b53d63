"""A stored turn, put together from the log of turns: the prompt that engines were sent, and the reply they gave."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from typing import NamedTuple, TypeVar

import numpy as np

from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.log import read_last, read_next
from asyncrl.bus.publish import read
from asyncrl.bus.sealing import check_keys
from asyncrl.engine.routing import rows_of
from asyncrl.errors import AsyncRLError
from topics.payload_refs import Experts
from topics.topic import TURNS, Topic
from topics.trajectories import Segment
from topics.turns import TURN_FINISHED, TURN_SAMPLED, TURN_STARTED, TurnFinished, TurnSampled, TurnStarted
from topics.wire import Int32Array, UInt8Array, WireError

_MOST_BYTES = 64 << 20  # of histories that a reader keeps
M = TypeVar("M", TurnStarted, TurnFinished)


class TurnUnreadable(AsyncRLError):
    """A turn, or one before it, is not stored as it must be."""


class StoredTurn(NamedTuple):
    """A turn that has ended."""

    started: TurnStarted
    finished: TurnFinished
    prompt: Int32Array  # [P]
    experts: UInt8Array  # [P + T, B] of prompt and reply, zeros if unknown; B is 0 without experts

    def segment(self) -> Segment:
        """Return the turn as one row: the prompt with mask 0, the reply with mask 1, as it was sampled.

        The closing of a reply that was cut by its length is in the prompt of the next turn, with mask 0 too.

        Raises:
            TurnUnreadable: its reply has not one log-prob and one version for each token.
        """
        reply, before = self.finished, len(self.prompt)
        sizes = len(reply.tokens), len(reply.logprobs), len(reply.versions)
        if len(set(sizes)) > 1 or not sizes[0]:
            words = "{} tokens, {} log-probs, {} versions".format(*sizes)
            raise TurnUnreadable(f"turn {reply.turn_id} has {words}; expected one of each for every token, and one")
        return Segment(
            tokens=np.concatenate([self.prompt, reply.tokens]),
            mask=np.repeat(np.array([0, 1], np.uint8), [before, sizes[0]]),
            logprobs=np.concatenate([np.zeros(before, np.float32), reply.logprobs]),
            versions=np.concatenate([np.full(before, -1, np.int32), reply.versions]),
        )


class _History(NamedTuple):
    """The prompt and reply of a turn."""

    ids: Int32Array = np.empty(0, np.int32)
    experts: UInt8Array = np.empty((0, 0), np.uint8)  # see `StoredTurn`

    @property
    def bytes(self) -> int:
        return self.ids.nbytes + self.experts.nbytes


class TurnReader:
    """Reads turns from the log, and remembers the newest histories: turns of a conversation share their beginning."""

    def __init__(self, bus: Bus, *, routed: bool = False) -> None:
        self._bus = bus
        self._routed = routed  # whether the experts of tokens are wanted, too
        self._known: OrderedDict[str, _History] = OrderedDict()  # by turn
        self._bytes = 0

    async def read(self, turn_id: str) -> StoredTurn:
        """Read a turn.

        Raises:
            TurnUnreadable: it, its end, or a turn that its prompt begins with is missing or cannot be read.
            SecretGone: a data key of one of them is not there.
            BusError: the server does not answer.
        """
        chain = [await self._facts(turn_id)]
        while (parent := chain[-1][0].parent) and parent not in self._known:
            chain.append(await self._facts(parent))
        history = self._known[parent] if parent else _History()
        if parent:  # cached turns expire with their keys
            await check_keys(self._bus, chain[-1][0].older)
        for started, finished in reversed(chain):
            if len(history.ids) != started.known:
                words = f"turn {started.turn_id} follows {started.known} tokens of {started.parent or 'none'}"
                raise TurnUnreadable(f"{words}, which has {len(history.ids)}")
            prompt = np.concatenate([history.ids, started.tokens])
            ids = np.concatenate([prompt, finished.tokens])
            redacted = started.skip == "redacted"  # then rows are those of other tokens
            own = finished.routing if self._routed and not redacted else None
            history = _History(ids, _experts(history.experts, len(ids), own))
            self._keep(started.turn_id, history)
        return StoredTurn(*chain[0], prompt, history.experts)

    async def _facts(self, turn_id: str) -> tuple[TurnStarted, TurnFinished]:
        return await asyncio.gather(
            self._read(TURN_STARTED, TurnStarted, turn_id), self._read(TURN_FINISHED, TurnFinished, turn_id)
        )

    async def _read(self, topic: Topic[M], kind: type[M], turn_id: str) -> M:
        record = await read_last(self._bus, topic, turn_id, stored=True)
        if record is None:
            raise TurnUnreadable(f"turn {turn_id} has no {topic.name} in {TURNS.name}")
        try:
            return await read(self._bus, kind, record)
        except (WireError, BlobMissing) as error:
            raise TurnUnreadable(f"turn {turn_id}: {topic.name}, message {record.sequence}: {error}") from error

    def _keep(self, turn_id: str, history: _History) -> None:
        before = self._known.pop(turn_id, _History())
        self._known[turn_id] = history
        self._bytes += history.bytes - before.bytes
        while self._bytes > _MOST_BYTES and len(self._known) > 1:
            self._bytes -= self._known.popitem(last=False)[1].bytes


async def read_sampled(bus: Bus, turn_id: str) -> list[TurnSampled]:
    """Return the stored parts of an unfinished reply, in their order; unreadable ones are left out."""
    parts, subject, after = list[TurnSampled](), TURN_SAMPLED.subject(bus.run, turn_id), 0
    while (record := await read_next(bus, TURNS, subject, after + 1)) is not None:
        after = record.sequence
        with contextlib.suppress(SecretGone, WireError, BlobMissing):
            parts.append(await read(bus, TurnSampled, record))
    return parts


def _experts(before: UInt8Array, length: int, given: Experts | None) -> UInt8Array:
    """Return the experts of a turn's tokens, [length, B]: those of the turns before it, then its own."""
    rows = np.zeros((length, given.width if given is not None else before.shape[1]), np.uint8)
    if rows.shape[1] == before.shape[1]:
        rows[: len(before)] = before
    if given is not None:
        own = rows_of(given)[: max(0, length - given.first)]
        rows[given.first : given.first + len(own)] = own
    return rows
