"""One connection to NATS: requests with many answers under way, durable publishes, faults that speak.

nats-py carries the bytes. Its own JetStream publish is not used: `publish_async` never resolves when the server
answers with an error or dies, and `publish` makes a task and a random token for each message.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from asyncrl.bus.errors import BusDenied, BusGone, BusRefused, BusUnreachable, WrongSequence
from asyncrl.bus.server import BusAddress
from asyncrl.crash import crash_point

REQUEST_S = 5.0  # a server that is alive answers within this, or the request is repeated
STREAM_FULL = 10077
WRONG_SEQUENCE = (10070, 10071, 10164)
_SUBJECT = re.compile(r'to "?([^\s"]+)')


class Disconnected(Exception):
    """The connection was lost while a request was under way; whether it was carried out is unknown."""


class _AckError(msgspec.Struct):
    code: int
    err_code: int = 0
    description: str = ""


class Ack(msgspec.Struct):
    """The server's word that a message is stored."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _AckError | None = None


_ACK = msgspec.json.Decoder(Ack)


class Bus:
    """A connection of one actor to the topics of one run."""

    def __init__(self, client: Client, run: str, publish_deadline_s: float) -> None:
        self.client = client
        self.run = run
        self.publish_deadline_s = publish_deadline_s
        self.reconnects = 0
        self.on_reconnect: list[Callable[[], None]] = []
        self.on_fault: Callable[[Exception], None] | None = None  # a reader raised, or the connection ended
        self._prefix = f"_INBOX.{secrets.token_hex(8)}"
        self._closing = False
        self._next = 0
        self._waiting: dict[str, tuple[str, asyncio.Future[Msg]]] = {}
        self._window = asyncio.Semaphore(512)  # publishes under way; more only lengthens the server's queue

    @classmethod
    async def connect(
        cls, address: BusAddress, run: str, *, name: str = "", deadline_s: float = 10.0, publish_deadline_s: float = 120
    ) -> Bus:
        """Connect, or say why not.

        Raises:
            BusUnreachable: nothing answered within `deadline_s`, or the server refused the credentials.
        """
        faults: list[str] = []
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    bus = cls(Client(), run, publish_deadline_s)
                    try:
                        await bus._open(address, name or f"asyncrl {run}", faults)
                    except (OSError, nats.errors.Error, ssl.SSLError) as error:
                        await _close_quietly(bus.client)
                        faults.append(str(error) or type(error).__name__)
                        if _is_final(faults, error):
                            raise BusUnreachable(_why_not(address, faults, deadline_s)) from error
                        await asyncio.sleep(0.1)  # a server that starts, or that hung up on us: it tells nobody when
                    else:
                        return bus
        except TimeoutError as error:
            await _close_quietly(bus.client)
            raise BusUnreachable(_why_not(address, faults, deadline_s)) from error

    async def _open(self, address: BusAddress, name: str, faults: list[str]) -> None:
        """Connect the client and listen for answers; what goes wrong meanwhile is added to `faults`."""
        connecting = True

        async def on_error(error: Exception) -> None:
            faults.append(str(error) or type(error).__name__)
            del faults[:-8]
            self._on_error(error)
            if connecting and "authorization" in str(error).lower():
                raise error  # another attempt with the same credentials ends in the same way

        async def on_disconnect() -> None:
            self._on_disconnect()

        async def on_closed() -> None:
            if not (connecting or self._closing) and self.on_fault is not None:
                self.on_fault(
                    BusGone(f"the server ended the connection: {faults[-1] if faults else 'no reason given'}")
                )

        async def on_reconnect() -> None:
            self.reconnects += 1
            for callback in self.on_reconnect:
                callback()

        options: dict[str, Any] = {"user": address.user, "password": address.password} if address.user else {}
        await self.client.connect(
            address.url,
            name=name,
            error_cb=on_error,
            disconnected_cb=on_disconnect,
            reconnected_cb=on_reconnect,
            closed_cb=on_closed,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,  # type: ignore[arg-type]  # seconds; declared int, used as a float
            pending_size=64 * 1024 * 1024,
            skip_subject_validation=True,
            **options,
        )
        await self.client.subscribe(f"{self._prefix}.*", cb=self._on_reply, pending_msgs_limit=0)
        connecting = False

    async def close(self) -> None:
        """Send what is buffered, then disconnect."""
        self._closing = True
        try:
            async with asyncio.timeout(3):
                await self.client.flush()
        except (TimeoutError, nats.errors.Error, OSError):
            pass  # a server that is gone takes no last words
        await _close_quietly(self.client)

    @property
    def max_payload(self) -> int:
        """Greatest message the server takes, bytes."""
        return int(self.client.max_payload)

    async def subscribe(
        self, subject: str, callback: Callable[[Msg], Awaitable[None]]
    ) -> Callable[[], Awaitable[None]]:
        """Listen to live traffic (core NATS: what is missed is gone); returns what ends it."""
        subscription = await self.client.subscribe(subject, cb=callback, pending_msgs_limit=0, pending_bytes_limit=0)
        return subscription.unsubscribe

    async def send(self, subject: str, payload: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Say something that nobody needs to keep."""
        await self.client.publish(subject, payload, headers=headers)

    async def request(
        self, subject: str, payload: bytes = b"", headers: dict[str, str] | None = None, timeout_s: float = REQUEST_S
    ) -> Msg:
        """Ask and wait for one answer.

        Raises:
            TimeoutError: no answer in time.
            Disconnected: the connection broke meanwhile.
            BusDenied: the server does not allow it.
        """
        self._next += 1
        token = str(self._next)
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[token] = (subject, future)
        timer = asyncio.get_running_loop().call_later(timeout_s, _time_out, future, subject)
        try:
            await self.client.publish(subject, payload, reply=f"{self._prefix}.{token}", headers=headers)
            return await future
        except nats.errors.OutboundBufferLimitError as error:
            raise Disconnected from error
        finally:
            timer.cancel()
            self._waiting.pop(token, None)

    async def store(self, subject: str, payload: bytes, headers: dict[str, str]) -> Ack:
        """Publish into a stream and return once the server has it, with the sequence it got.

        Faults of the connection and a full stream are waited out up to the publish deadline. The caller's
        `Nats-Msg-Id` header makes a repeat harmless.

        Raises:
            BusGone: no acknowledgement within the deadline.
            WrongSequence: the compare-and-set expectation in the headers did not hold.
            BusDenied, BusRefused: the server said no.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.publish_deadline_s
        pause = 0.02
        async with self._window:
            crash_point("publish.before")
            while True:
                try:
                    left = max(0.01, deadline - loop.time())
                    reply = await self.request(subject, payload, headers, min(REQUEST_S, left))
                    crash_point("publish.stored")
                    if reply.data:
                        ack = _ACK.decode(reply.data)
                        if ack.error is None:
                            return ack
                        self._raise_unless_full(subject, ack.error)
                        reason = ack.error.description
                    else:
                        reason = "no stream listens to this subject"
                except (TimeoutError, Disconnected):
                    reason = "no acknowledgement"
                except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError) as error:
                    raise BusGone(f"{subject}: the connection is closed") from error
                if loop.time() + pause > deadline:
                    raise BusGone(f"{subject}: {reason} within {self.publish_deadline_s:.0f} s")
                await asyncio.sleep(pause)
                pause = min(1.0, pause * 2)

    async def api(self, subject: str, body: object = None, timeout_s: float = REQUEST_S) -> dict[str, Any]:
        """Call the JetStream API.

        Raises:
            BusRefused: the server answered with an error.
            BusUnreachable: JetStream is not enabled, or did not answer.
        """
        payload = msgspec.json.encode(body) if body is not None else b""
        try:
            reply = await self.request(f"$JS.API.{subject}", payload, timeout_s=timeout_s)
        except (TimeoutError, Disconnected) as error:
            raise BusUnreachable(f"JetStream did not answer {subject} within {timeout_s:.0f} s") from error
        if not reply.data:
            raise BusUnreachable(
                "the NATS server has no JetStream; start it with JetStream enabled (nats-server -js) or leave nats.url "
                "empty"
            )
        answer: dict[str, Any] = msgspec.json.decode(reply.data)
        if "error" in answer:
            said = answer["error"]
            raise BusRefused(subject, int(said.get("err_code", said["code"])), str(said.get("description", "")))
        return answer

    @staticmethod
    def _raise_unless_full(subject: str, error: _AckError) -> None:
        if error.err_code in WRONG_SEQUENCE:
            raise WrongSequence(f"{subject}: {error.description}")
        if error.err_code != STREAM_FULL and error.code != 503:  # 503: no leader yet, or the server is starting
            raise BusRefused(subject, error.err_code, error.description)

    async def _on_reply(self, message: Msg) -> None:
        waiting = self._waiting.get(message.subject.rsplit(".", 1)[1])
        if waiting is not None and not waiting[1].done():
            waiting[1].set_result(message)

    def _on_disconnect(self) -> None:
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(Disconnected())

    def _on_error(self, error: Exception) -> None:
        """Turn a refusal that the server reports out of band into the fault of the request that caused it.

        What a callback raised arrives here too, and must not end silently.
        """
        if not isinstance(error, nats.errors.Error | OSError | EOFError | TimeoutError) and self.on_fault is not None:
            self.on_fault(error)
        text = str(error)
        if "permissions violation" not in text.lower():
            return
        found = _SUBJECT.search(text)
        denied = found.group(1).lower() if found else ""
        for subject, future in self._waiting.values():
            if subject.lower() == denied and not future.done():
                future.set_exception(BusDenied(f"not allowed by the server: {text}"))


def _time_out(future: asyncio.Future[Msg], subject: str) -> None:
    if not future.done():
        future.set_exception(TimeoutError(f"no answer on {subject}"))


def _is_final(faults: list[str], error: Exception) -> bool:
    """Whether another attempt must end in the same way: wrong credentials, wrong certificate."""
    return isinstance(error, ssl.SSLError) or any("authorization" in fault.lower() for fault in faults)


def _why_not(address: BusAddress, faults: list[str], deadline_s: float) -> str:
    denied = next((fault for fault in reversed(faults) if "authorization" in fault.lower()), None)
    if denied is not None:
        user = repr(address.user) if address.user else "without a name"
        return f"NATS at {address.url} refused user {user}: {denied}; check nats.user and nats.password_file"
    said = next((fault for fault in reversed(faults) if fault), "no answer")
    return f"NATS at {address.url} did not answer within {deadline_s:.0f} s ({said}); is the server running there?"


async def _close_quietly(client: Client) -> None:
    try:
        async with asyncio.timeout(3):
            await client.close()
    except (TimeoutError, nats.errors.Error, OSError):
        pass  # closing a broken connection may break again
