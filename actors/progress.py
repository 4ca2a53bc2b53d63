"""The progress of one trajectory on a rollout worker: kept inside its fence, and found again there by the next worker.

Each message costs, so there are as few as the bound on what may be lost allows, given what the requests under way may
still bring. Messages that leave together share a write, a read and a wake-up at both ends: the first trajectory of a
worker that must publish takes along those that need no more messages if they do so now, or are near their own.
"""

from __future__ import annotations

import asyncio
import math
from typing import TypeVar

from actors.actor import Context
from actors.worker import PUBLISHING, Delivery
from asyncrl.bus.log import Record, read_last, read_message
from asyncrl.bus.talk import BlobMissing, Fenced, attempt_of, read, say_fenced
from asyncrl.crash import crash_point
from asyncrl.tasks.journal import Journal
from topics.prompts import PromptIssued
from topics.table import topic_of
from topics.topic import TRAJECTORIES, Topic
from topics.trajectories import (
    TRAJECTORY_GENERATED,
    TRAJECTORY_PROGRESSED,
    TrajectoryGenerated,
    TrajectoryProgressed,
)
from topics.wire import Message, WireError

M = TypeVar("M", bound=Message)


class Progress:
    """What a rollout function was told, and how much of it is stored.

    Raises, from whatever publishes:
        Fenced: another worker has published since; this one has lost the trajectory.
    """

    def __init__(self, context: Context, issued: PromptIssued, delivery: Delivery[PromptIssued]) -> None:
        self.journal = Journal()
        self.lines: set[int] = set()  # of weights that sampled tokens
        self.last_delivery = 1  # the one in which it last came further
        self.left = 0  # tokens that the requests under way may still bring
        self._context = context
        self._limit = context.cast.rollout.progress_tokens
        self._issued = issued
        self._delivery = delivery
        self._name = issued.trajectory_id
        self._newest = 0  # sequence of the newest message inside the fence
        self._chain = (0, 0)  # sequences of the first and the newest published progress
        self._kept_tokens = 0  # sampled tokens in the newest published progress
        self._keeping = asyncio.Lock()
        self._background: asyncio.Task[None] | None = None
        self._over = False

    @property
    def unkept(self) -> int:
        """Sampled tokens that are lost if this process dies now."""
        return self._delivery.tokens - self._kept_tokens

    @property
    def due(self) -> bool:
        """Whether more than `progress_tokens` could be lost before long: tokens go on coming until it is stored."""
        near = self.unkept >= self._limit - self._limit // 32 and self._needed(self.unkept + self.left) > 0
        return near and not (self._over or self._is_keeping)

    async def look(self) -> bool:
        """Read what was said of this trajectory before: True when nothing is left to do; else resume from it."""
        newest = await self._read_newest()
        if newest is None:
            return False
        if (attempt := attempt_of(newest)) is None:
            self._pass_over(newest, "its header attempt is no number")
        elif attempt != self._issued.attempt:
            self._newest = newest.sequence
            return attempt > self._issued.attempt  # this attempt has ended, another was issued
        elif topic_of(newest.subject) is TRAJECTORY_GENERATED:
            return True
        else:
            await self._resume(newest)
        return False

    async def is_generated(self) -> bool:
        """Whether this attempt has its result."""
        newest = await self._read_newest()
        return (
            newest is not None
            and topic_of(newest.subject) is TRAJECTORY_GENERATED
            and attempt_of(newest) == self._issued.attempt
        )

    async def keep(self, *, taken_over: bool = False) -> None:
        """Publish the journal as it is now; returns when it is stored.

        Args:
            taken_over: whether it only says who works on it from now on.
        """
        async with self._keeping:
            crash_point("progress.before")
            news = self.journal.news()
            message = TrajectoryProgressed(
                trajectory_id=self._name,
                attempt=self._issued.attempt,
                delivery=self._delivery.at.deliveries,
                offset=self.journal.tokens,
                journal=news,
                previous=self._chain[1],
                first=self._chain[0],
                lines=sorted(self.lines),
                taken_over=taken_over,
            )
            await self._say(TRAJECTORY_PROGRESSED, message)
            crash_point("progress.stored")
            self.journal.told(news)
            self._chain = (self._chain[0] or self._newest, self._newest)
            self._kept_tokens = message.offset
            if not taken_over:
                self.last_delivery = message.delivery
            self._context.count("progressed")
        self._delivery.advanced()

    def keep_with_others(self) -> None:
        """Publish progress if it is due, or as well said now as later; a lost fence ends the work here."""
        needed = self._needed(self.unkept + self.left)
        # Half: the generation may end before any message is due. Three quarters: one more, for the company of others.
        least = 0.5 if self._needed(self.left) < needed else 0.75
        if needed and self.unkept > least * self._limit and not (self._over or self._is_keeping):
            self._background = asyncio.create_task(self.keep())
            self._background.add_done_callback(self._kept)

    async def say_result(self, message: TrajectoryGenerated) -> None:
        """Publish the result; no progress comes any more."""
        self.close()
        if self._background is not None:
            await asyncio.wait({self._background})
        await self._say(TRAJECTORY_GENERATED, message)

    def close(self) -> None:
        """Begin no more messages of its own accord."""
        self._over = True

    async def _say(self, topic: Topic[M], message: M) -> None:
        id = f"{self._name}:{self._issued.attempt}:{self._delivery.at.deliveries}"
        bus = self._context.bus
        with self._delivery.waiting(PUBLISHING):
            self._newest = await say_fenced(bus, topic, message, key=self._name, id=id, expected=self._newest)

    def _needed(self, tokens: int) -> int:
        """How many messages so many tokens need before the last of them is there."""
        return max(0, math.ceil(tokens / self._limit) - 1)

    @property
    def _is_keeping(self) -> bool:
        return self._background is not None and not self._background.done()

    def _kept(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, Fenced):
            self._context.count("fenced")
        else:
            self._context.fail(error)
        self._delivery.end(done=False)

    async def _read_newest(self) -> Record | None:
        bus = self._context.bus
        return await read_last(bus, TRAJECTORIES, f"asyncrl.{bus.run}.trajectory.*.{self._name}")

    async def _resume(self, newest: Record) -> None:
        """Go on from the newest progress, or from the start where it cannot be read."""
        try:
            told, first = await self._read_back(newest)
            self.journal = Journal(progress.journal for progress in reversed(told))
        except (WireError, BlobMissing) as error:
            self._pass_over(newest, str(error))
            return
        self._newest, self._chain = newest.sequence, (first, newest.sequence)
        self.last_delivery = max((progress.delivery for progress in told if not progress.taken_over), default=1)
        self._kept_tokens = self._delivery.tokens = told[0].offset
        self.lines.update(told[0].lines)
        self._context.count("resumed_elsewhere")

    async def _read_back(self, newest: Record) -> tuple[list[TrajectoryProgressed], int]:
        """All that was told, newest first, and the sequence of the first message.

        Raises:
            WireError, BlobMissing: a part of it is damaged or gone.
        """
        told, record = [await read(self._context.bus, TrajectoryProgressed, newest)], newest
        while previous := told[-1].previous:
            found = await read_message(self._context.bus, TRAJECTORIES, previous)
            if found is None or previous >= record.sequence:
                raise WireError(f"message {previous}, which message {record.sequence} continues, is not there")
            record = found
            told.append(await read(self._context.bus, TrajectoryProgressed, record))
        return told, record.sequence

    def _pass_over(self, newest: Record, reason: str) -> None:
        """What stands last inside the fence cannot be read: it is buried, and the work goes on behind it."""
        self._context.bury_soon(newest, reason)
        self._newest = newest.sequence
