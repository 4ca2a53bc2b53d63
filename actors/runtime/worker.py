"""The loop of all workers: pull, think, publish, acknowledge; leases renewed while the work advances."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Generic, TypeVar

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from actors.runtime.actor import Context
from asyncrl.bus.connection import Disconnected
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import Record
from asyncrl.bus.provision import WorkQueue
from asyncrl.bus.publish import BlobMissing, read
from asyncrl.bus.pull import Position, Puller, Source, position
from asyncrl.crash import crash_point
from topics.actors import HeldWork
from topics.wire import Message, WireError, prepare

M = TypeVar("M", bound=Message)

PUBLISHING = "a publish"  # what is published has nats.publish_deadline_s to be stored
_TOLD = 8  # pieces of held work that the vital signs tell of
_TOLD_AFTER_S = 2.0


class Delivery(Generic[M]):
    """One piece of work, leased to this worker."""

    __slots__ = (
        "_bus",
        "advanced_at",
        "at",
        "began_at",
        "lease_s",
        "lost",
        "message",
        "parked",
        "place",
        "record",
        "renewed_at",
        "task",
        "tokens",
        "verdict",
    )

    def __init__(self, context: Context, record: Record, at: Position, raw: Msg) -> None:
        self._bus = context.bus
        self.record = record
        self.at = at
        self.message = raw
        self.began_at = self.advanced_at = self.renewed_at = time.monotonic()
        self.lease_s, self.lost = context.cast.rollout.lease_s, False
        self.place = ""  # what it waits for, or which part of it runs, as its vital signs tell it
        self.tokens = 0  # sampled so far
        self.parked = 0  # parts of it for which nobody thinks that it hangs
        self.task: asyncio.Task[None] | None = None
        self.verdict: bool | None = None  # why it was ended from outside: done, or somebody else's

    def end(self, *, done: bool) -> None:
        """Stop the work: it is done with (and will be acknowledged), or somebody else has it."""
        self.verdict = done
        if self.task is not None:
            self.task.cancel()

    def advanced(self) -> None:
        """The work came further: its lease deserves renewal."""
        self.advanced_at = time.monotonic()

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """The time of what has a limit of its own, or waits for others: no reason to think that the work hangs."""
        self.parked += 1
        self.place = place
        try:
            yield
        finally:
            self.parked -= 1
            if self.place == place:
                self.place = ""
            self.advanced()

    def told(self, now: float) -> HeldWork:
        """What the vital signs tell of it."""
        name = self.record.subject.rsplit(".", 1)[1]
        held_s, quiet_s = round(now - self.began_at, 1), round(now - self.advanced_at, 1)
        return HeldWork(name, held_s, quiet_s, self.place, self.tokens)

    @property
    def lapsed(self) -> bool:
        """Whether the lease has run out once, as while a process is frozen: the work may be somebody else's."""
        return self.lost or time.monotonic() > self.renewed_at + self.lease_s

    async def renew(self) -> None:
        """Keep the lease for another term."""
        self.lost, self.renewed_at = self.lapsed, time.monotonic()
        await self._bus.send(self.message.reply, b"+WPI")

    def granted_again(self, message: Msg) -> None:
        """It came to the same worker once more. One that was frozen cannot tell when: a lapsed lease stays lapsed."""
        self.lost, self.message, self.renewed_at = self.lapsed, message, time.monotonic()

    async def give_back(self) -> None:
        """Let somebody else have it at once."""
        await self._bus.send(self.message.reply, b"-NAK")


Handler = Callable[[M, Delivery[M]], Awaitable[bool]]


class WorkerLoop(Generic[M]):
    """Holds up to `slots` deliveries at once, one task each.

    The handler returns True when the work is done and said (it is then acknowledged), False to leave it to whoever
    has it now. A handler that raises `BusError` ends the worker: nothing is assumed stored.
    """

    def __init__(
        self,
        context: Context,
        queue: WorkQueue,
        kind: type[M],
        handler: Handler[M],
        slots: int,
    ) -> None:
        self._context = context
        self._queue = queue
        self._kind = kind
        self._handler = handler
        self._slots = slots
        prepare(kind)
        self._held: dict[int, Delivery[M]] = {}  # by sequence
        context.holding = self._oldest
        self._done: list[Delivery[M]] = []  # said, and not yet acknowledged
        self._acking: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._source = (context.handed or self._pull)(self._receive)

    async def run(self) -> None:
        """Work until the actor is asked to stop, then finish or give back what is held."""
        await self._source.start(self._slots)
        renewals = asyncio.create_task(self._renew_leases())
        self._context.watch(renewals)
        await self._context.stop.wait()
        renewals.cancel()
        await self._source.close()
        await asyncio.sleep(0)  # a task that has not begun would end without giving its work back
        for delivery in list(self._held.values()):
            if delivery.task is not None:
                delivery.task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._idle.wait()
                if self._acking is not None:
                    await self._acking

    def _pull(self, receive: Callable[[Msg], None]) -> Source:
        context, queue = self._context, self._queue
        return Puller(
            context.bus,
            queue.stream.full_name(context.bus.run),
            queue.name,
            receive,
            on_lost=lambda reason: context.log.warning("work queue lost", queue=queue.name, reason=reason),
        )

    def _receive(self, raw: Msg) -> None:
        at = position(raw.reply)
        record = Record(self._queue.stream, at.stream_sequence, raw.subject, raw.headers or {}, raw.data, at.time_ns)
        delivery: Delivery[M] = Delivery(self._context, record, at, raw)
        mine = self._held.get(record.sequence)
        if mine is not None:
            # The lease ran out under our own hands: go on with it, unless that work hangs.
            if time.monotonic() - mine.advanced_at < self._context.cast.rollout.stall_s or mine.parked:
                mine.granted_again(raw)
                self._source.grant()
                return
            mine.end(done=False)
        self._held[record.sequence] = delivery
        self._idle.clear()
        delivery.task = asyncio.create_task(self._work(delivery))

    async def _work(self, delivery: Delivery[M]) -> None:
        context = self._context
        done = False
        try:
            done = await self._handle(delivery)
        except asyncio.CancelledError:
            done = delivery.verdict or False
            if delivery.verdict is None:
                with contextlib.suppress(NatsError):
                    await delivery.give_back()
        except BusError as error:
            context.fail(error)
            with contextlib.suppress(NatsError):
                await self._source.close()  # else it comes straight back to this worker
                await delivery.give_back()
        except Exception as error:  # a fault of ours must not end silently with its task: the actor dies aloud
            context.fail(error)
        finally:
            if self._held.get(delivery.record.sequence) is delivery:
                del self._held[delivery.record.sequence]
            if not self._held:
                self._idle.set()
        if done:
            # The slot is free as soon as the result is stored; the acknowledgement follows on its own.
            self._done.append(delivery)
            if self._acking is None or self._acking.done():
                self._acking = asyncio.create_task(self._acknowledge())
        self._source.grant()

    async def _handle(self, delivery: Delivery[M]) -> bool:
        context = self._context
        crash_point("work.received")
        try:
            message = await read(context.bus, self._kind, delivery.record)
            return await self._handler(message, delivery)
        except (WireError, BlobMissing) as error:
            await context.bury(delivery.record, str(error))
            return True

    async def _acknowledge(self) -> None:
        """Acknowledge what is done and said. The server takes acknowledgements in order: its answer to the last of a
        few is its word for all. A lost answer only means one more delivery."""
        while self._done:
            crash_point("work.said")
            done, self._done = self._done, []
            with contextlib.suppress(TimeoutError, Disconnected, NatsError):
                for delivery in done[:-1]:
                    await self._context.bus.send(delivery.message.reply, b"+ACK")
                await self._context.bus.request(done[-1].message.reply, b"+ACK")
            crash_point("work.acknowledged")

    def _oldest(self) -> list[HeldWork]:
        """What is held for seconds, the oldest first. A dictionary keeps the order in which work came."""
        now = time.monotonic()
        oldest = islice(self._held.values(), _TOLD)
        return [delivery.told(now) for delivery in oldest if now - delivery.began_at > _TOLD_AFTER_S]

    async def _renew_leases(self) -> None:
        settings = self._context.cast.rollout
        while True:
            await asyncio.sleep(settings.lease_s / 3)
            now = time.monotonic()
            self._context.vitals["held"] = len(self._held)
            for delivery in list(self._held.values()):
                quiet_s = 0.0 if delivery.parked else now - delivery.advanced_at
                if quiet_s < settings.stall_s:
                    with contextlib.suppress(NatsError):
                        await delivery.renew()
                elif quiet_s > settings.stall_s + settings.lease_s:
                    self._context.log.warning("work hangs", subject=delivery.record.subject, quiet_s=round(quiet_s, 1))
                    delivery.end(done=False)  # its lease has run out: it is somebody else's
