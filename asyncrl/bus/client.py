"""The client of nats-py: headers in a third of the time, for every message of a run has a dozen; pings that end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from functools import lru_cache
from typing import Any, TypeAlias

import nats.errors
from nats.aio import client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.protocol.command import hpub_cmd

from asyncrl.bus.errors import BusUnreachable

LAST_S = 3.0  # time for a server to process publishes and deliver pending messages before an end
End: TypeAlias = Callable[[], Coroutine[Any, Any, None]]  # of a subscription


class Client(client.Client):
    """As its base in all that it does."""

    on_raised: Callable[[Exception], None]  # is given what a callback raises

    async def _connect_to_server(self, server: client.Srv) -> None:
        # `wait_for` of Python 3.11 loses a cancellation that arrives with a refusal, and the base then dials for ever.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        await super()._connect_to_server(server)

    async def listen(self, subject: str, callback: Callable[[Msg], Awaitable[None]], *, drained: bool = False) -> End:
        """Subscribe without a limit on what waits; returns what ends it.

        Args:
            callback: is called as a message is read, and waits for no other one.
            drained: at its end, messages that the server already sent still reach the callback.

        Raises:
            BusUnreachable: the connection broke.
        """
        try:
            opened = await self.subscribe(subject, cb=callback, pending_msgs_limit=0, pending_bytes_limit=0)
        except RuntimeError as error:  # the loop has closed the socket, and the client has not noticed yet
            raise BusUnreachable(f"the connection broke while {subject} was subscribed to") from error

        async def end() -> None:
            with contextlib.suppress(nats.errors.Error, OSError, RuntimeError):  # a lost connection has forgotten it
                if drained:
                    await self._drain_subscription(opened)
                await opened.unsubscribe()

        return end

    async def _drain_subscription(self, subscription: Subscription) -> None:
        """Make the server send no more, and deliver received messages; the client's `drain` flushes, see `acks`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                await self._send_unsubscribe(subscription._id)
                if await self.answers(LAST_S):  # which may overtake the request
                    await self.answers(LAST_S)

    async def answers(self, within_s: float) -> bool:
        """Return whether the server answers a ping in time; then everything published before it has arrived.

        `flush` of nats-py drops its pending pings, and the late pong then ends its read loop silently: the client stays
        connected and deaf.
        """
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        try:
            await self._send_ping(answered)
        except (nats.errors.Error, OSError, RuntimeError, AssertionError):
            return False  # there is no connection, or it has just been closed
        await asyncio.wait({answered}, timeout=within_s)
        return answered.done() and not answered.cancelled()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        """Call the callback as a message is read; the base has a queue and a task between, at twice the price."""
        subscription = self._subs.get(sid)
        if subscription is None or subscription._cb is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        try:
            found = await self._process_headers(headers)
        except (ValueError, IndexError):  # a damaged status line must not end the read loop, as it does in the base
            found = {}
        words = subject.decode("utf-8", "replace"), reply.decode("utf-8", "replace")
        message = self.msg_class(self, *words, data, found, _sid=sid)
        try:
            await subscription._cb(message)
        except nats.errors.Error as error:  # the connection was closed under an answer
            await self._error_cb(error)
        except Exception as error:
            self.on_raised(error)

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        found = {}
        for line in raw.decode("utf-8", "replace").split("\r\n"):
            name, colon, value = line.partition(":")
            if colon and (known := _name_in(name)):
                found[known] = value.strip(" \t\r\n\v\f")
        return found

    async def _send_publish(
        self, subject: str, reply: str, payload: bytes, payload_size: int, headers: dict[str, Any] | None
    ) -> None:
        lines = "".join([f"{name}: {value}\r\n" for name, value in (headers or {}).items()])
        if not headers or not lines.count("\n") == lines.count("\r") == len(headers):  # the base leaves out line ends
            await super()._send_publish(subject, reply, payload, payload_size, headers)
            return
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += payload_size
        await self._send_command(hpub_cmd(subject, reply, f"NATS/1.0\r\n{lines}\r\n".encode(), payload))
        if self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()


@lru_cache(1024)
def _name_in(text: str) -> str:
    """Return the name of a header; "" for an invalid one with white space or characters other than ASCII."""
    words = text.split() if text.isascii() else []
    return words[0] if len(words) == 1 else ""
