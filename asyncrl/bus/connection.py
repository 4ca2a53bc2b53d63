"""One connection to NATS: concurrent requests, durable publishes, explicit faults.

nats-py carries the bytes. Its own JetStream publish is not used: `publish_async` never resolves when the server
answers with an error or dies, and `publish` makes a task and a random token for each message.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
import nats
import nats.errors
from nats.aio.msg import Msg

from asyncrl.background import BackgroundTasks
from asyncrl.bus.acks import PASSING, Ack, denied_subject, read_ack, refusal
from asyncrl.bus.address import BusAddress
from asyncrl.bus.client import LAST_S, Client, End
from asyncrl.bus.errors import BusDenied, BusError, BusGone, BusRefused, BusUnreachable, Disconnected
from asyncrl.bus.key_cache import Vault
from asyncrl.bus.layout import StreamLayout
from asyncrl.crash import crash_point
from topics.table import BUILT_IN

REQUEST_S = 5.0  # a server that is alive answers within this, or the request is repeated


class _Waiting(NamedTuple):
    """A call that waits for the server."""

    subject: str
    answered: asyncio.Future[Msg]
    is_last: Callable[[Msg], bool]


class Bus:
    """A connection of one actor to the topics of one run."""

    def __init__(self, client: Client, address: BusAddress, run: str, publish_deadline_s: float) -> None:
        self.client = client
        self.address = address
        self.layout = StreamLayout(address.domain)
        self.run = run
        self.tables = BUILT_IN  # of the run; `load_actors` returns those of a run with actors of its user
        self.name = ""  # the name of this client
        self.publish_deadline_s = publish_deadline_s
        self.vault = Vault()
        self.reconnects = 0
        self.denied = ""  # the server's newest refusal for want of a permission
        self.on_reconnect: list[Callable[[], None]] = []
        self.on_fault: Callable[[BaseException], None] = lambda _: None  # a reader raised, or the connection ended
        client.on_raised = self._on_raised
        self.readers = BackgroundTasks(self._on_raised)  # work of readers outside callbacks
        self.ended_by: BusError | None = None  # why the connection ended permanently, unless it was closed here
        self._prefix = ""
        self._closing = False
        self._ending: asyncio.Task[None] | None = None
        self._next = 0
        self._waiting: dict[str, _Waiting] = {}
        self._window = asyncio.Semaphore(512)  # concurrent publishes; more only lengthens the server's queue

    @classmethod
    async def connect(
        cls, address: BusAddress, run: str, *, name: str = "", deadline_s: float = 10.0, publish_deadline_s: float = 120
    ) -> Bus:
        """Connect, or report why not.

        Raises:
            BusUnreachable: nothing answered within `deadline_s`.
            BusDenied: the server refused the login, or its certificate is not trusted: at once.
        """
        faults: deque[str] = deque(maxlen=8)
        until = (loop := asyncio.get_running_loop()).time() + deadline_s
        try:
            async with asyncio.timeout_at(until):
                while True:
                    bus = cls(Client(), address, run, publish_deadline_s)
                    bus.name = name
                    try:
                        await bus._open(name or f"asyncrl {run}", faults)
                    except BusDenied:
                        await _close_quietly(bus.client)
                        raise
                    except (OSError, nats.errors.Error) as error:
                        faults.append(str(error) or type(error).__name__)
                        final = refusal(address, error)
                        # A handshake that failed is never quite closed.
                        await _close_quietly(bus.client, 3.0 if final is None else 0.1)
                        if final is not None or loop.time() >= until:
                            raise final or TimeoutError from error
                        await asyncio.sleep(0.1)  # no event announces its return
                    else:
                        return bus
        except TimeoutError as error:
            await _close_quietly(bus.client)
            failure = next((fault for fault in reversed(faults) if fault), "no answer")
            raise BusUnreachable(
                f"NATS at {address.url} did not answer within {deadline_s:.0f} s ({failure}); is it running there?"
            ) from error

    async def _open(self, name: str, faults: deque[str]) -> None:
        """Connect the client and listen for answers; `faults` collects each fault until then."""
        connecting = True

        async def on_error(error: Exception) -> None:
            faults.append(str(error) or type(error).__name__)
            final = refusal(self.address, error)
            if connecting and final is not None:  # a login is refused again
                raise error
            if final is None:
                self._on_error(error)
            else:
                self._end(final)

        async def on_closed() -> None:
            if not connecting:
                reason = self.client.last_error or (faults[-1] if faults else "no reason given")
                gone = BusGone(f"the server ended the connection: {reason}")
                self._end(refusal(self.address, reason) or gone)

        await self.client.connect(
            self.address.url.split(","),
            name=name,
            error_cb=on_error,
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
            closed_cb=on_closed,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,  # type: ignore[arg-type]  # seconds; declared int, used as a float
            pending_size=64 * 1024 * 1024,
            skip_subject_validation=True,
            **self.address.login(lambda: bool(self.client._server_info.get("tls_required"))),
        )
        connecting = False
        self._prefix = self._new_inbox()
        await self.subscribe(f"{self._prefix}.*", self._on_reply)

    async def close(self) -> None:
        """Send buffered data, then disconnect."""
        self._closing = True
        if self.client.is_connected:
            await self.client.answers(LAST_S)
        await _close_quietly(self.client)

    @property
    def max_payload(self) -> int:
        """Greatest message the server takes, bytes."""
        return int(self.client.max_payload)

    @property
    def clustered(self) -> bool:
        """Return whether several servers keep copies, so that a reader may lag a writer."""
        return bool(self.client._server_info.get("cluster"))

    async def subscribe(self, subject: str, callback: Callable[[Msg], Awaitable[None]]) -> End:
        """Listen to live traffic (core NATS: missed messages are lost); returns a function that ends it.

        Raises:
            BusDenied: the server does not allow it.
        """
        denied: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[f"subscribe {subject}"] = _Waiting(subject, denied, bool)
        try:
            end = await self.client.listen(subject, callback)
            # A ping is answered after what came before it was refused. A server that is away refuses later: a fault.
            for _ in range(2):  # the first overtakes what waits to be written, and has it written
                await self.client.answers(REQUEST_S)
            if denied.done() and isinstance(error := denied.exception(), BusDenied):
                raise error
            return end
        finally:
            self._waiting.pop(f"subscribe {subject}", None)

    async def open_inbox(self, callback: Callable[[Msg], Awaitable[None]], *, drained: bool) -> tuple[str, End]:
        """Open an inbox that only this user may read; returns its name, for replies to `name.anything`, and a function
        that ends it; with `drained`, messages already sent still reach the callback.
        """
        inbox = self._new_inbox()
        return inbox, await self.client.listen(f"{inbox}.*", callback, drained=drained)

    def _new_inbox(self) -> str:
        return f"{self.address.inbox}.{secrets.token_hex(8)}"

    async def send(self, subject: str, payload: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Publish a message that need not be stored."""
        # As in _publish, and without its price.
        with contextlib.suppress(nats.errors.OutboundBufferLimitError, RuntimeError):
            await self.client.publish(subject, payload, headers=headers)

    async def _publish(self, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None = None) -> None:
        try:
            await self.client.publish(subject, payload, reply=reply, headers=headers)
        except (nats.errors.OutboundBufferLimitError, RuntimeError) as error:  # the latter: the socket is closed, and
            raise Disconnected from error  # the client has not noticed yet

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        headers: dict[str, str] | None = None,
        *,
        timeout_s: float = REQUEST_S,
        is_last: Callable[[Msg], bool] = lambda _: True,
    ) -> Msg:
        """Send a request and return the answer, the last one of several.

        Args:
            is_last: is given each answer until it returns True, or raises what this raises.

        Raises:
            TimeoutError: the answer has not come in time.
            Disconnected: the connection broke.
            BusDenied: the server does not allow it.
        """
        self._next += 1
        token = str(self._next)
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[token] = _Waiting(subject, future, is_last)
        timer = asyncio.get_running_loop().call_later(timeout_s, _time_out, future, subject)
        try:
            await self._publish(subject, payload, f"{self._prefix}.{token}", headers)
            return await future
        finally:
            timer.cancel()
            self._waiting.pop(token, None)

    async def store(self, subject: str, payload: bytes, headers: dict[str, str]) -> Ack:
        """Store a message under a subject of the topic table; returns the server's acknowledgement.

        Faults of the connection and a full stream are waited out up to the publish deadline. The caller's
        `Nats-Msg-Id` header makes a repeat harmless.

        Raises:
            BusGone: no acknowledgement within the deadline.
            WrongSequence: the compare-and-set expectation in the headers did not hold.
            BusDenied, BusRefused: the server refused.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.publish_deadline_s
        pause, ingest, reason = 0.02, self.tables.ingest_of(subject), ""
        async with self._window:
            crash_point("publish.before")
            while True:
                timeout_s = min(REQUEST_S, max(0.01, deadline - loop.time()))
                try:
                    reply = await self.request(ingest, payload, headers, timeout_s=timeout_s)
                    crash_point("publish.stored")
                    if reply.data:
                        ack = read_ack(reply.data)
                        if ack.error is None:
                            return ack
                        ack.raise_unless_passing(subject)
                        reason = ack.error.description
                    else:
                        reason = "no stream listens to this subject"
                except (TimeoutError, Disconnected):
                    reason = reason if timeout_s < REQUEST_S else ""  # cut short, it says less than an answer before
                except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError) as error:
                    raise self.ended_by or BusGone(f"{subject}: the connection is closed") from error
                if loop.time() + pause > deadline:
                    raise BusGone(f"{subject}: {reason or 'no acknowledgement'} within {self.publish_deadline_s:.0f} s")
                await asyncio.sleep(pause)
                pause = min(1.0, pause * 2)

    async def api(self, subject: str, body: object = None) -> dict[str, Any]:
        """Call the JetStream API.

        Raises:
            BusRefused: the server answered with an error.
            BusUnreachable: JetStream is not enabled, or did not answer.
        """
        payload = msgspec.json.encode(body) if body is not None else b""
        try:
            reply = await self.request(self.layout.call(subject), payload)
        except (TimeoutError, Disconnected) as error:
            raise BusUnreachable(f"JetStream did not answer {subject} within {REQUEST_S:.0f} s") from error
        if not reply.data:
            raise BusUnreachable(
                "the NATS server has no JetStream; start it with JetStream enabled (nats-server -js) or leave nats.url "
                "empty"
            )
        answer: dict[str, Any] = msgspec.json.decode(reply.data)
        if "error" in answer:
            failure = answer["error"]
            code, words = int(failure.get("err_code", failure["code"])), str(failure.get("description", ""))
            if code in PASSING and "insufficient" not in words:  # room does not come by waiting
                raise BusUnreachable(f"the NATS cluster is not ready for {subject}: {words}")
            raise BusRefused(subject, code, words)
        return answer

    async def _on_reply(self, message: Msg) -> None:
        waiting = self._waiting.get(message.subject.rsplit(".", 1)[1])
        if waiting is None or waiting.answered.done():
            return
        try:
            if waiting.is_last(message):
                waiting.answered.set_result(message)
        except (Disconnected, BusError) as error:
            waiting.answered.set_exception(error)

    async def _on_disconnect(self) -> None:
        self._fail_waiting(Disconnected())

    async def _on_reconnect(self) -> None:
        self.reconnects += 1
        for callback in self.on_reconnect:
            callback()

    def _on_raised(self, fault: BaseException) -> None:
        self.on_fault(fault)  # which is set later

    def _on_error(self, error: Exception) -> None:
        """Turn a refusal that the server reports out of band into the fault of the request that caused it."""
        if not isinstance(error, nats.errors.Error | OSError | EOFError | TimeoutError):
            self.on_fault(error)
        denied = denied_subject(error)
        if denied is None:
            return
        refused, handled = denied.error(self.address, self.run), False
        for subject, future, _ in list(self._waiting.values()):
            if subject.lower() == denied.subject and not future.done():
                refused, handled = denied.error(self.address, self.run, subject), True
                future.set_exception(refused)
        self.denied = str(refused)
        if not handled:
            self.on_fault(refused)

    def _end(self, error: BusError) -> None:
        """End the connection permanently: waiting callers get the reason, and no retry follows."""
        if self._closing:
            return
        self._closing, self.ended_by = True, error
        self._fail_waiting(error)
        self.on_fault(error)

        async def end() -> None:
            await _close_quietly(self.client, 0.1)
            self._fail_waiting(error)  # calls made before the client was closed

        self._ending = asyncio.create_task(end())

    def _fail_waiting(self, error: Exception) -> None:
        for waiting in self._waiting.values():
            if not waiting.answered.done():
                waiting.answered.set_exception(error)


def _time_out(future: asyncio.Future[Msg], subject: str) -> None:
    if not future.done():
        future.set_exception(TimeoutError(f"no answer on {subject}"))


async def _close_quietly(client: Client, within_s: float = 3.0) -> None:
    # A broken connection may break again; RuntimeError: uvloop has closed the socket.
    with contextlib.suppress(TimeoutError, nats.errors.Error, OSError, RuntimeError):
        async with asyncio.timeout(within_s):
            await client.close()
