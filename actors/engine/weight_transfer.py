"""The direct way of a version into a server: out of the learner's memory, without the store.

It is the faster of two ways: if it fails for any reason, the version is read from the store.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import zstandard

from actors.runtime.actor import Context
from asyncrl.background import all_of
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record
from asyncrl.bus.publish import publish
from asyncrl.config.engine_settings import Capability, EngineGroup
from asyncrl.config.settings import Config
from asyncrl.engine.client import EngineClient
from asyncrl.engine.errors import EngineError, EngineRefused
from asyncrl.errors import AsyncRLError
from asyncrl.host import VISIBLE_GPUS, host_name
from asyncrl.ports import free_port
from asyncrl.weights.sender_calls import Join, Open, Send
from asyncrl.weights.sender_process import SenderFailed, SenderProcess
from asyncrl.weights.shared_names import NotShared, check_names
from asyncrl.weights.transfer_manifest import Described, GroupPlace
from topics.topic import VITALS, Topic
from topics.weights import WEIGHTS_OFFERED, WeightsOffered, WeightsPublished, WeightsRequested, WeightsReturned

_ANSWER_S = 2.0  # for a learner that lives
_LEAVE_S = 1.0
_WORDS = 1024  # characters of a reason
_HERE = "127.0.0.1"
# SGLang sets these, and both sides must agree.
_SENDER = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}


def unseen(config: Config, group: EngineGroup) -> str:
    """Return why a server may not map the weights of the learner's ranks; empty if it may.

    Each rank has its share on its own GPU. SGLang ends if it is given memory of a GPU that it does not see.
    """
    ranks = config.learner.ranks
    if config.weights.transport != "ipc" or config.learner.device == "cpu" or ranks == 1:
        return ""
    for found, why in (
        (group.can(Capability.ADDRESSES), "it is of another owner"),
        (0 < group.gpus_each < ranks, f"engine.gpus gives it {group.gpus_each}"),
        (VISIBLE_GPUS in group.environment, f"{VISIBLE_GPUS} is set"),
    ):
        if found:
            return f"the server may not see the GPUs on which {ranks} ranks have the weights: {why}"
    return ""


class DirectFailed(AsyncRLError):
    """A version did not come the direct way; the server may have parts of it."""


class WeightTransfer:
    """The versions that one engine takes out of the learner's memory."""

    def __init__(self, context: Context, group: EngineGroup, server: EngineClient) -> None:
        self.kind = context.config.weights.transport
        self.failure = ""  # why the version asked for last does not come this way; "" also while the sender starts
        self._context = context
        self._deadline_s = context.config.weights.transport_deadline_s
        self._server = server
        self._ranks = group.ranks
        self._unseen = unseen(context.config, group)
        self._waiting: dict[str, asyncio.Future[WeightsOffered]] = {}
        self._lent = ""  # key of the version that the learner keeps in memory for this engine
        self._until = 0.0  # when the learner may write something else into that memory
        self._starting: asyncio.Task[list[_Sender]] | None = None
        self._sending: list[_Sender] = []  # those whose ranks have tensors of the version
        self._left: list[str] = []  # groups of the server whose senders were ended
        subject = WEIGHTS_OFFERED.subject(context.bus.run, context.actor_id)
        self._listener = Listener(context.bus, VITALS, self._take, context.refuse, subjects=[subject], newest=True)

    async def start(self) -> None:
        """Begin to listen for offers, and start the sender processes."""
        await self._listener.start()
        self._senders()

    async def close(self) -> None:
        """End the listener and the sender processes."""
        await self._listener.close()
        self._left += [sender.group for sender in self._senders() or () if sender.joined]
        await self._leave_groups()
        self._end_senders()

    async def ask(self, version: WeightsPublished, loaded: str) -> WeightsOffered | None:
        """Ask for a version, and prepare its transfer while the server samples; None if there will be no transfer.

        Args:
            loaded: key of the weights that the server should have; "": it has others.
        """
        self.failure = ""
        if self._unseen:
            self._note(version.key, self._unseen)
            return None
        if self.kind != "ipc" and self._senders() is None:
            return None  # they start
        self._until = time.monotonic() + self._deadline_s
        name = secrets.token_hex(8)
        answer: asyncio.Future[WeightsOffered] = asyncio.get_running_loop().create_future()
        self._waiting[name] = answer
        self._lent = version.key  # from the moment the learner reads the request
        try:
            await publish(self._context.bus, WeightsRequested(self._context.actor_id, version.key, name))
            async with asyncio.timeout(min(_ANSWER_S, self._deadline_s)):
                offer = await answer
        except TimeoutError:
            await self.give_back(f"the learner did not answer within {min(_ANSWER_S, self._deadline_s):g} s")
            return None
        finally:
            del self._waiting[name]
        if offer.reason or offer.host != host_name():
            await self.give_back(offer.reason or f"the learner is on another host, {offer.host}")
            return None
        try:
            await self._within(self._prepare(offer, loaded))
        except DirectFailed as error:
            await self.give_back(str(error))
            await self._leave_groups()
            return None
        return offer

    async def load(self, offer: WeightsOffered) -> None:
        """Load a version into the server, which is held. The memory is returned later: a GPU may still read it after
        the server's answer.

        Raises:
            DirectFailed: it has not come, or not in time; it must be loaded in another way.
        """
        try:
            await self._within(self._transfer(offer))
        except DirectFailed as error:
            await self.give_back(str(error))
            await self._leave_groups()
            raise

    async def give_back(self, reason: str = "") -> None:
        """Return the learner's memory, if the learner waits for it; with the reason if the transfer failed."""
        key, self._lent = self._lent, ""
        if reason:
            self._note(key, reason)
        if key:
            await publish(self._context.bus, WeightsReturned(self._context.actor_id, key, reason[:_WORDS]))

    def _note(self, key: str, reason: str) -> None:
        self.failure = reason[:_WORDS]
        self._context.count("direct_failed")
        self._context.log.warning("weights not taken directly", key=key, reason=reason)

    def _take(self, _topic: Topic[Any], offer: WeightsOffered, _record: Record) -> None:
        future = self._waiting.get(offer.request)
        if future is not None and not future.done():
            future.set_result(offer)

    async def _within(self, work: Awaitable[None]) -> None:
        """Await something until the memory may change.

        Raises:
            DirectFailed: it failed, or took longer; a sender that may still send is gone.
        """
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._until - time.monotonic()):
                await work
            if time.monotonic() > self._until:  # this process was frozen: the bytes read may belong to another version
                raise TimeoutError
        except (EngineError, DirectFailed, SenderFailed, OSError, TimeoutError) as error:
            self._end_senders()
            late = f"it took longer than weights.transport_deadline_s = {self._deadline_s:g} s"
            raise DirectFailed(late if isinstance(error, TimeoutError) else str(error)) from error

    async def _prepare(self, offer: WeightsOffered, loaded: str) -> None:
        senders = self._senders()
        if senders is None:
            return
        # SGLang ends at a call for a group that it has not joined, as one has not that its owner started again.
        if any(sender.joined for sender in senders) and (found := await self._server.label()) != loaded:
            raise DirectFailed(f"the server is not the one that joined the groups: it has the weights {found!r}")
        await self._leave_groups()
        # A learner that continues without some GPUs has fewer ranks.
        held = [(sender, tensors) for sender, tensors in zip(senders, offer.tensors, strict=False) if tensors]
        answers = await all_of(*(sender.call(Open(tensors)) for sender, tensors in held))
        self._sending = [sender for sender, _ in held]
        for sender, answer in zip(self._sending, answers, strict=True):
            sender.calls = answer.calls
            if not sender.joined:  # one after the other: SGLang's scheduler is blocked during each
                place = GroupPlace(self.kind, _HERE, free_port(), sender.group, 1 + self._ranks)
                await all_of(sender.call(Join(place, self._deadline_s)), self._server.join_group(place))
                sender.joined = True

    async def _transfer(self, offer: WeightsOffered) -> None:
        if self.kind == "ipc":
            parts = [_checked(call) for of_rank in offer.tensors for call in of_rank]
            for number, part in enumerate(parts, 1):
                await self._server.update_from_memory(part, offer.key if number == len(parts) else None, self._ranks)
            return
        calls = [(one, number, tensors) for one in self._sending for number, tensors in enumerate(one.calls)]
        if not calls:
            raise DirectFailed("the senders are gone")
        for number, (sender, call, tensors) in enumerate(calls, 1):  # SGLang takes one after the other
            label = offer.key if number == len(calls) else None
            await all_of(sender.call(Send(call)), self._server.update_from_group(sender.group, tensors, label))

    def _senders(self) -> list[_Sender] | None:
        """Return the sender processes, and start them if needed; None while they start, or if no sender is needed."""
        if self.kind == "ipc":
            return None
        if self._starting is None:
            name = f"asyncrl-{self._context.actor_id}-{secrets.token_hex(4)}"
            log = self._context.files.logs / f"{self._context.actor_id}.sender.log"
            self._starting = asyncio.create_task(_started(self._context.config.learner.ranks, name, log))
        if not self._starting.done():
            return None
        error = self._starting.exception()
        if error is None:
            return self._starting.result()
        self._starting = None  # the next look starts another one
        self._note("", str(error))
        return None

    def _end_senders(self) -> None:
        """End the sender processes and their transfers; the server's groups are useless afterwards."""
        starting, self._starting, self._sending = self._starting, None, []
        if starting is not None:
            starting.cancel()
            if starting.done() and not starting.cancelled() and starting.exception() is None:
                for sender in starting.result():
                    sender.kill()
                    self._left += [sender.group] * sender.joined

    async def _leave_groups(self) -> None:
        """Have the server leave groups whose senders are gone; a server that does not answer is asked again later."""
        for name in [*self._left]:
            try:
                async with asyncio.timeout(_LEAVE_S):
                    await self._server.leave_group(name)
            except EngineRefused:
                pass  # the server has no group of this name: it left, or was restarted
            except (EngineError, TimeoutError):
                return
            if name in self._left:
                self._left.remove(name)


class _Sender(SenderProcess):
    """A process that sends the tensors of one rank over a separate group."""

    group = ""  # its name
    joined = False
    calls: Sequence[list[Described]] = ()  # tensors of the version, by the call that they travel in


async def _started(ranks: int, name: str, log: Path) -> list[_Sender]:
    """Start a sender for each rank of the learner.

    Raises:
        SenderFailed: one ended.
    """
    starts = [asyncio.create_task(_Sender.start(log, _SENDER)) for _ in range(ranks)]
    try:
        senders = await asyncio.gather(*starts)
    except BaseException:
        for sender in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(sender, _Sender):
                sender.kill()
        raise
    for rank, sender in enumerate(senders):
        sender.group = f"{name}-{rank}"
    return senders


def _checked(call: bytes) -> bytes:
    """Unpack what a server will read as a pickle, which could make it call anything."""
    try:
        packed = zstandard.decompress(call)
        check_names(packed)
    except (NotShared, zstandard.ZstdError) as error:
        raise DirectFailed(f"the learner's answer: {error}") from error
    return packed
