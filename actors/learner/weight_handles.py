"""Offers of the newest version in the memory of the ranks: engines read it there until they return it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from actors.runtime.actor import Context
from asyncrl.background import first_of
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record
from asyncrl.bus.publish import publish
from asyncrl.errors import AsyncRLError
from asyncrl.host import host_name
from topics.topic import VITALS, Topic
from topics.weights import WEIGHTS_REQUESTED, WEIGHTS_RETURNED, WeightsOffered, WeightsRequested, WeightsReturned

_MARGIN_S = 0.5  # an engine gives up so much earlier than the learner: its deadline begins with its request


class Offers:
    """The version in memory, and which engines read it.

    An engine that requests the version may read it for `weights.transport_deadline_s`. The version does not change
    within that time. A dead or frozen engine delays the next copy no longer than that.
    """

    def __init__(self, context: Context, share: Callable[[], Awaitable[list[list[bytes]]]]) -> None:
        self._context = context
        self._share = share  # returns the tensors in memory, as `weights.offered` has them
        self._key = ""  # of the version that may be read
        self._readers: dict[str, float] = {}  # engines, and until when
        self._news = asyncio.Event()
        topics = [topic.pattern(context.bus.run) for topic in (WEIGHTS_REQUESTED, WEIGHTS_RETURNED)]
        self._listener = Listener(context.bus, VITALS, self._take, context.refuse, subjects=topics, newest=True)

    async def start(self) -> None:
        """Begin to answer requests, if engines may ask."""
        if self._context.config.weights.transport != "never":
            await self._listener.start()

    async def close(self) -> None:
        """Answer no more."""
        await self._listener.close()

    def open(self, key: str) -> None:
        """Offer the newest copy, a version that is in the store and about to be announced."""
        self._key = key

    def forget(self) -> None:
        """Offer nothing and wait for no engine: the memory is gone."""
        self._key = ""
        self._readers.clear()

    async def withdraw(self) -> None:
        """Offer nothing more, and return when no engine reads the memory, or the deadline of each has passed."""
        self._key = ""
        while self._readers:
            self._news.clear()
            left_s = max(self._readers.values()) - time.monotonic()
            if left_s <= 0:
                self._context.count("direct_overdue", len(self._readers))
                self._context.log.warning("weights in memory not returned", engines=sorted(self._readers))
                return self._readers.clear()
            await first_of(self._news.wait(), timeout_s=left_s)

    def _take(self, _topic: Topic[Any], message: Any, record: Record) -> None:
        if isinstance(message, WeightsReturned):
            self._readers.pop(message.engine_id, None)
            self._news.set()
            return
        deadline_s = self._context.config.weights.transport_deadline_s
        if time.time() - record.time_ns / 1e9 < deadline_s:  # no engine waits for the answer to an older one
            if message.key == self._key:  # at once: that it is returned may be read next
                self._readers[message.engine_id] = time.monotonic() + deadline_s + _MARGIN_S
            self._context.tasks.start(self._answer(message))

    async def _answer(self, request: WeightsRequested) -> None:
        offer = WeightsOffered(request.engine_id, request.key, request.request, host_name())
        if request.key != self._key:
            offer.reason = f"the learner has {self._key or 'no version'} in memory"
        else:
            try:
                offer.tensors = await self._share()
            except AsyncRLError as error:
                offer.reason = str(error)
            if self._key != request.key and not offer.reason:
                offer.reason = "the learner continues with the next version"
        if offer.reason:
            offer.tensors = []
            self._readers.pop(request.engine_id, None)
            self._news.set()
        await publish(self._context.bus, offer)
