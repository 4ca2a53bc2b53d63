"""The loop of all workers: pull, handle, publish, acknowledge; leases renewed while the work advances."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import islice
from typing import Generic, TypeAlias, TypeVar

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from actors.runtime.actor import Context
from actors.runtime.delivery import Delivery, purged_claim
from actors.runtime.isolation import Isolation, WorkFailed
from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.errors import BusError, Disconnected
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.log import Record
from asyncrl.bus.publish import Fenced, Unpublishable, read
from asyncrl.bus.pull import Puller, Source, position
from asyncrl.crash import crash_point
from topics.actors import HeldWork
from topics.groups import GroupCompleted
from topics.ids import stage_of
from topics.prompts import PromptIssued
from topics.roles import pool_of
from topics.table import WorkQueue
from topics.trajectories import (
    TRAJECTORY_FAILED,
    TrajectoryFailed,
    TrajectoryGenerated,
    TrajectorySubmitted,
    member_fields,
    tokens_sampled,
)
from topics.wire import Message, WireError, prepare

M = TypeVar("M", bound=Message)

_REPORTED = 8  # pieces of held work that the vital signs list
_REPORTED_AFTER_S = 2.0


Produced: TypeAlias = Sequence[Message] | None  # None: the work is left to another holder
Handler = Callable[[M, Delivery[M]], Awaitable[Produced]]


class WorkerLoop(Generic[M]):
    """Holds up to `slots` deliveries at once, one task each. Evaluations that have a separate queue get half as many
    slots in addition.

    The handler returns the messages that the work produces: they are published in order, and then the work is
    acknowledged. None leaves it to its present holder. A `WorkFailed` is published as `trajectory.failed` by those who
    may. A `BusError` ends the worker: nothing is assumed stored.
    """

    def __init__(self, context: Context, handler: Handler[M], slots: int, *, counts_runs: bool = False) -> None:
        if slots < 1:
            raise ValueError(f"{context.role}: found slots = {slots}, expected 1 or more: pieces of work held at once")
        self.isolation = Isolation(context)
        self._counts_runs = counts_runs  # the handler calls `isolation.done_alone`; else each delivery counts as a run
        self._context = context
        self._queues = context.bus.tables.queues_of_pool(pool_of(context.actor_id))
        self._topic = self._queues[0].topic
        self._kind: type[M] = self._topic.message
        self._handler = handler
        self._slots = slots
        self._surplus = 0  # slots that end with the work in them
        prepare(self._kind)
        self._held: dict[int, Delivery[M]] = {}  # by sequence
        context.holding = self._oldest
        self._done: list[Delivery[M]] = []  # published, and not yet acknowledged
        self._acking: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._sources: list[Source] = (
            [self._pull(queue) for queue in self._queues]
            if context.handed is None
            else [context.handed(partial(self._receive, 0))]
        )

    async def run(self) -> None:
        """Work until the actor is asked to stop, then finish or return all held work."""
        for source in reversed(self._sources):  # evaluations first: they are of the newest weights
            await source.start(self._slots if source is self._sources[0] else max(1, self._slots // 2))
        renewals = self._context.tasks.start(self._renew_leases())
        await self._context.stop.wait()
        renewals.cancel()
        await self._close_sources()
        await asyncio.sleep(0)  # a task that has not begun would end without giving its work back
        for delivery in list(self._held.values()):
            delivery.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._idle.wait()
                if self._acking is not None:
                    await self._acking
        await self.isolation.close()

    @property
    def held(self) -> int:
        """Pieces of work that take a slot."""
        return sum(map(self._takes_slot, self._held.values()))

    def resize(self, slots: int) -> None:
        """Have that many slots from now on; the youngest work beyond them is given back."""
        more, self._slots = slots - self._slots, slots
        if more >= 0:
            used = min(more, self._surplus)
            self._surplus -= used
            if more > used:
                self._sources[0].grant(more - used)
            return
        self._surplus -= more
        holders = [one for one in self._held.values() if self._takes_slot(one) and not one.returning]
        for delivery in holders[slots:]:
            delivery.returning = True
            delivery.cancel()

    def _pull(self, queue: WorkQueue) -> Source:
        context = self._context
        return Puller(
            context.bus,
            f"{queue.stream.full_name(context.bus.run)}.{queue.name}",
            partial(self._receive, self._queues.index(queue)),
            on_lost=lambda reason: context.log.warning("work queue lost", queue=queue.name, reason=reason),
            leased=True,
        )

    async def _close_sources(self) -> None:
        await asyncio.gather(*(source.close() for source in self._sources))

    def _receive(self, number: int, raw: Msg) -> None:
        """Begin with a piece of work, which a source has handed out."""
        source = self._sources[number]
        at = position(raw.reply)
        record = Record(self._topic.stream, at.stream_sequence, raw.subject, raw.headers or {}, raw.data, at.time_ns)
        delivery: Delivery[M] = Delivery(self._context, record, at, raw)
        held = self._held.get(record.sequence)
        if held is not None:
            # The lease ran out while this worker held the work: continue, unless the work hangs.
            if time.monotonic() - held.advanced_at < self._context.config.workers.stall_s or held.waiting_on_others:
                held.granted_again(raw)
                source.grant()
                return
            held.end(done=False)
        self._held[record.sequence] = delivery
        self._idle.clear()
        takes_slot = self._takes_slot(delivery)
        if not takes_slot:
            source.grant()
        delivery.task = asyncio.create_task(self._work(delivery, source if takes_slot else None))

    async def _work(self, delivery: Delivery[M], source: Source | None) -> None:
        """
        Args:
            source: may hand out another piece once this one is over; None if it already did.
        """
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
            delivery.settled = True  # the loop, which ends now, does not cancel what follows
            context.fail(error)
            with contextlib.suppress(NatsError):
                await self._close_sources()  # else it comes straight back to this worker
                await delivery.give_back()
        except Exception as error:  # a fault of ours must not end silently with its task: the actor dies with an error
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
        if source is not None and source is self._sources[0] and self._surplus:
            self._surplus -= 1
        elif source is not None:
            source.grant()

    def _takes_slot(self, delivery: Delivery[M]) -> bool:
        """Return whether it counts against the slots of its queue. Evaluations without a separate queue run in addition
        to the slots, so that training waits for no evaluation. The id of a live turn is random and tells no stage."""
        trains = self._topic.key == "turn_id" or stage_of(delivery.name) != "eval"
        return self._topic.lane or trains or self._context.handed is not None

    async def _handle(self, delivery: Delivery[M]) -> bool:
        context = self._context
        crash_point("work.received")
        try:
            message = await read(context.bus, self._kind, delivery.record)
            produced = await self._produced(message, delivery)
            delivery.settled = True
            for output in produced or ():
                await delivery.publish(output)
                context.count(context.bus.tables.topic_for(output).name.partition(".")[2])
            return produced is not None
        except Fenced:
            context.count("fenced")
            return False
        except SecretGone as error:
            context.count("purged")
            if context.role in TRAJECTORY_FAILED.publishers:
                await delivery.publish(purged_claim(delivery.record, delivery.at.num_delivered, str(error)))
            return True
        except Unpublishable:  # a fault of the handler, not of its work
            raise
        except (WireError, BlobMissing) as error:
            await context.reject(delivery.record, str(error))
            return True

    async def _produced(self, message: M, delivery: Delivery[M]) -> Produced:
        try:
            if not self._counts_runs and await self.isolation.done_alone(delivery, delivery.at.num_delivered - 1):
                return None
            return await self._asked(message, delivery)
        except WorkFailed as error:
            return self._failure(message, delivery, error)

    async def _asked(self, message: M, delivery: Delivery[M]) -> Produced:
        """Return what the handler produces.

        Raises:
            TypeError: that is no list of messages, or the handler no async function.
        """
        handling: object = self._handler(message, delivery)
        if not inspect.isawaitable(handling):
            raise TypeError(f"the handler of {self._context.role} is no async function: `async def handle(work, held)`")
        produced: Produced = await handling
        given: object = produced
        if given is None or (isinstance(given, list | tuple) and all(isinstance(one, Message) for one in given)):
            return produced
        found = f"{type(given).__name__} {given!r}"[:120]
        raise TypeError(f"the handler of {self._context.role} returned {found}; expected a list of messages, or None")

    def _failure(self, work: Message, delivery: Delivery[M], error: WorkFailed) -> Produced:
        """The claim that nothing will come of some work; what follows from it is the buffer's decision.

        None if the lease has run out: while a process is frozen calls time out, and another worker may be about to
        finish.
        """
        context, name = self._context, delivery.name
        context.log.warning("work failed", work=name, reason=error.reason, detail=str(error), lapsed=delivery.lapsed)
        if delivery.lapsed:
            context.count("lapsed")
            return None
        if context.role not in TRAJECTORY_FAILED.publishers:
            return []
        failures = []
        for part in work.members if isinstance(work, GroupCompleted) else [work]:
            if not isinstance(part, PromptIssued | TrajectoryGenerated | TrajectorySubmitted):
                continue
            tokens = delivery.tokens + delivery.discarded if isinstance(part, PromptIssued) else tokens_sampled(part)
            fields = member_fields(part, delivery.at.num_delivered)
            failures.append(TrajectoryFailed(**fields, reason=error.reason, detail=str(error), tokens=tokens))
        return failures

    async def _acknowledge(self) -> None:
        """Acknowledge work that is done and published. The server processes acknowledgements in order, so the
        confirmation of the last one confirms all. A lost confirmation only means one more delivery."""
        while self._done:
            crash_point("work.published")
            done, self._done = self._done, []
            with contextlib.suppress(TimeoutError, Disconnected, NatsError):
                for delivery in done[:-1]:
                    await self._context.bus.send(delivery.message.reply, b"+ACK")
                await self._context.bus.request(done[-1].message.reply, b"+ACK")
            crash_point("work.acknowledged")

    def _oldest(self) -> list[HeldWork]:
        """Return the work held for seconds, the oldest first; a dictionary keeps the order of arrival."""
        now = time.monotonic()
        oldest = islice(self._held.values(), _REPORTED)
        return [delivery.vitals_entry(now) for delivery in oldest if now - delivery.began_at > _REPORTED_AFTER_S]

    async def _renew_leases(self) -> None:
        settings = self._context.config.workers
        while True:
            await asyncio.sleep(settings.lease_s / 3)
            now = time.monotonic()
            self._context.vitals["held"] = len(self._held)
            for delivery in list(self._held.values()):
                quiet_s = 0.0 if delivery.waiting_on_others else now - delivery.advanced_at
                if quiet_s < settings.stall_s:
                    with contextlib.suppress(NatsError):
                        await delivery.renew()
                elif quiet_s > settings.stall_s + settings.lease_s:
                    self._context.log.warning("work hangs", subject=delivery.record.subject, quiet_s=round(quiet_s, 1))
                    delivery.end(done=False)  # its lease has run out: another worker has it
