"""The direct way of a version into a server: out of the learner's memory, without the store.

It is the quicker of two: where it fails, for whatever reason, the version is read from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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
from asyncrl.config.engine_settings import EngineGroup
from asyncrl.config.settings import Config
from asyncrl.engine.client import EngineClient
from asyncrl.engine.errors import EngineError
from asyncrl.errors import AsyncRLError
from asyncrl.host import VISIBLE_GPUS, host_name
from asyncrl.ports import free_port
from asyncrl.weights.described import Described, GroupPlace
from asyncrl.weights.sender_calls import Join, Open, Send
from asyncrl.weights.sender_process import SenderFailed, SenderProcess
from topics.topic import VITALS, Topic
from topics.weights import WEIGHTS_OFFERED, WeightsOffered, WeightsPublished, WeightsRequested, WeightsReturned

_ANSWER_S = 2.0  # for a learner that lives
_LEAVE_S = 1.0
_CALL_BYTES = 1 << 30  # tensors of one call: a server makes room for them beside its model
_WORDS = 1024  # characters of a reason
_HERE = "127.0.0.1"
# SGLang sets these, and both sides must agree.
_SENDER = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}


def unseen(config: Config, group: EngineGroup) -> str:
    """Return why a server may not map the weights of the learner's ranks; empty where it may.

    Each rank has its share on a GPU of its own. SGLang ends where it is given memory of one that it does not see.
    """
    ranks = config.learner.ranks
    if config.weights.direct != "ipc" or config.learner.device == "cpu" or ranks == 1:
        return ""
    for found, why in (
        (group.kind == "external", "it is of another owner"),
        (group.gpus, "engine.gpus is set"),
        (VISIBLE_GPUS in group.environment, f"{VISIBLE_GPUS} is set"),
    ):
        if found:
            return f"the server may not see the GPUs on which {ranks} ranks have the weights: {why}"
    return ""


class DirectFailed(AsyncRLError):
    """A version did not come the direct way; the server may have parts of it."""


class DirectWay:
    """The versions that one engine takes out of the learner's memory."""

    def __init__(self, context: Context, group: EngineGroup, server: EngineClient) -> None:
        self.kind = context.config.weights.direct
        self.failure = ""  # why the version asked for last does not come this way; "" also while the sender starts
        self._context = context
        self._deadline_s = context.config.weights.direct_deadline_s
        self._server = server
        self._ranks = group.ranks
        self._unseen = unseen(context.config, group)
        self._waiting: dict[str, asyncio.Future[WeightsOffered]] = {}
        self._lent = ""  # key of the version that the learner keeps in memory for this engine
        self._until = 0.0  # when the learner may write something else into that memory
        self._starting: asyncio.Task[_Sender] | None = None
        self._tensors: list[Described] = []
        subject = WEIGHTS_OFFERED.subject(context.bus.run, context.actor_id)
        self._listener = Listener(context.bus, VITALS, self._take, context.refuse, subjects=[subject], newest=True)

    async def start(self) -> None:
        """Begin to listen for offers, and to make ready what is needed."""
        await self._listener.start()
        self._sender()

    async def close(self) -> None:
        """End what was begun for it."""
        await self._listener.close()
        sender = self._sender()
        if sender is not None and sender.joined:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await self._server.leave_group(sender.group)
        self._end_sender()

    async def ask(self, version: WeightsPublished, loaded: str) -> WeightsOffered | None:
        """Ask for a version, and prepare its transfer while the server samples; None where there will be none.

        Args:
            loaded: key of the weights that the server should have; "": it has others.
        """
        self.failure = ""
        if self._unseen:
            self._note(version.key, self._unseen)
            return None
        if self.kind != "ipc" and self._sender() is None:
            return None  # it starts
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
            return None
        return offer

    async def load(self, offer: WeightsOffered) -> None:
        """Load a version into the server, which is held. It is given back later: a GPU may read behind the answer.

        Raises:
            DirectFailed: it has not come, or not in time; it must be loaded in another way.
        """
        try:
            await self._within(self._transfer(offer))
        except DirectFailed as error:
            await self.give_back(str(error))
            raise

    async def give_back(self, reason: str = "") -> None:
        """Let the learner have its memory back, if it waits for that; with the reason where it was of no use."""
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
            if time.monotonic() > self._until:  # this process stood still: what was read may be another version
                raise TimeoutError
        except (EngineError, DirectFailed, SenderFailed, OSError, TimeoutError) as error:
            self._end_sender()
            late = f"it took longer than weights.direct_deadline_s = {self._deadline_s:g} s"
            raise DirectFailed(late if isinstance(error, TimeoutError) else str(error)) from error

    async def _prepare(self, offer: WeightsOffered, loaded: str) -> None:
        sender = self._sender()
        if sender is None:
            return
        # SGLang ends at a call for a group that it has not joined, as one has not that its owner started again.
        if sender.joined and (found := await self._server.label()) != loaded:
            raise DirectFailed(f"the server is not the one that joined the group: it has the weights {found!r}")
        self._tensors = (await sender.call(Open(offer.tensors))).tensors
        if not sender.joined:
            place = GroupPlace(self.kind, _HERE, free_port(), sender.group, 1 + self._ranks)
            await all_of(sender.call(Join(place, self._deadline_s)), self._server.join_group(place))
            sender.joined = True

    async def _transfer(self, offer: WeightsOffered) -> None:
        sender = self._sender()
        if self.kind == "ipc":
            await self._server.update_from_memory(zstandard.ZstdDecompressor().decompress(offer.tensors), offer.key)
            return
        if sender is None:
            raise DirectFailed("the sender is gone")
        calls = _calls(self._tensors)
        for number, tensors in enumerate(calls, 1):
            label = offer.key if number == len(calls) else None
            names = [tensor.name for tensor in tensors]
            await all_of(sender.call(Send(names)), self._server.update_from_group(sender.group, tensors, label))

    def _sender(self) -> _Sender | None:
        """Return the process that sends; None while it starts, which this begins, or where none is needed."""
        if self.kind == "ipc":
            return None
        if self._starting is None:
            name = f"asyncrl-{self._context.actor_id}-{secrets.token_hex(4)}"
            log = self._context.files.logs / f"{self._context.actor_id}.sender.log"
            self._starting = asyncio.create_task(_started(name, log))
        if not self._starting.done():
            return None
        error = self._starting.exception()
        if error is None:
            return self._starting.result()
        self._starting = None  # the next look starts another one
        self._note("", str(error))
        return None

    def _end_sender(self) -> None:
        """End the process that sends, and with it whatever it does; the server's group is of no use then."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            if starting.done() and not starting.cancelled() and starting.exception() is None:
                starting.result().kill()


class _Sender(SenderProcess):
    """A process that sends over a group of its own."""

    group = ""  # its name
    joined = False


async def _started(group: str, log: Path) -> _Sender:
    sender = await _Sender.start(log, _SENDER)
    sender.group = group
    return sender


def _calls(tensors: Sequence[Described]) -> list[list[Described]]:
    """Tensors by the call that they travel in."""
    sizes = itertools.accumulate(tensor.bytes for tensor in tensors)
    found: dict[int, list[Described]] = {}
    for tensor, size in zip(tensors, sizes, strict=True):
        found.setdefault((size - 1) // _CALL_BYTES, []).append(tensor)
    return [*found.values()]
