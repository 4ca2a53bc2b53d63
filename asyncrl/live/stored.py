"""A stored turn, put together from the log of turns: the prompt that engines were sent, and the reply they gave."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import NamedTuple, TypeVar

import numpy as np

from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import read
from asyncrl.bus.sealing import check_keys
from asyncrl.errors import AsyncRLError
from topics.topic import TURNS, Topic
from topics.trajectories import Segment
from topics.turns import TURN_FINISHED, TURN_STARTED, TurnFinished, TurnStarted
from topics.wire import Int32Array, WireError

_MOST_TOKENS = 1_000_000  # of histories that a reader keeps
M = TypeVar("M", TurnStarted, TurnFinished)


class TurnUnreadable(AsyncRLError):
    """A turn, or one before it, is not stored as it must be."""


class StoredTurn(NamedTuple):
    """A turn that has ended."""

    started: TurnStarted
    finished: TurnFinished
    prompt: Int32Array  # [P]

    def segment(self) -> Segment:
        """Return the turn as one row: the prompt with mask 0, the reply with mask 1, as it was sampled.

        What closes a reply that was cut by its length stands in the prompt of the next turn: with mask 0, too.

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


class TurnReader:
    """Reads turns from the log, and remembers the newest histories: turns of a conversation share their beginning."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: OrderedDict[str, Int32Array] = OrderedDict()  # prompt and reply, by turn
        self._tokens = 0

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
        history = self._known[parent] if parent else np.empty(0, np.int32)
        if parent:  # what is remembered goes with its keys
            await check_keys(self._bus, chain[-1][0].older)
        for started, finished in reversed(chain):
            if len(history) != started.known:
                words = f"turn {started.turn_id} follows {started.known} tokens of {started.parent or 'none'}"
                raise TurnUnreadable(f"{words}, which has {len(history)}")
            prompt = np.concatenate([history, started.tokens])
            history = np.concatenate([prompt, finished.tokens])
            self._keep(started.turn_id, history)
        return StoredTurn(*chain[0], prompt)

    async def _facts(self, turn_id: str) -> tuple[TurnStarted, TurnFinished]:
        return await asyncio.gather(
            self._read(TURN_STARTED, TurnStarted, turn_id), self._read(TURN_FINISHED, TurnFinished, turn_id)
        )

    async def _read(self, topic: Topic[M], kind: type[M], turn_id: str) -> M:
        record = await read_last(self._bus, TURNS, topic.subject(self._bus.run, turn_id), stored=True)
        if record is None:
            raise TurnUnreadable(f"turn {turn_id} has no {topic.name} in {TURNS.name}")
        try:
            return await read(self._bus, kind, record)
        except (WireError, BlobMissing) as error:
            raise TurnUnreadable(f"turn {turn_id}: {topic.name}, message {record.sequence}: {error}") from error

    def _keep(self, turn_id: str, history: Int32Array) -> None:
        before = self._known.pop(turn_id, None)
        self._known[turn_id] = history
        self._tokens += len(history) - (len(before) if before is not None else 0)
        while self._tokens > _MOST_TOKENS and len(self._known) > 1:
            self._tokens -= len(self._known.popitem(last=False)[1])
