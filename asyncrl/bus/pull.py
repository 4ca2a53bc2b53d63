"""A continuous pull from one JetStream consumer: the reader grants credit, the server fills it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
from nats.aio.msg import Msg

from asyncrl.background import BackgroundTasks
from asyncrl.bus.client import End
from asyncrl.bus.connection import Bus

_EXPIRES_S = 30.0
_GRACE_S = 5.0
_AGAIN_S = 1.0
_BEAT_S = 3.0  # in a cluster the server confirms that often that a request is still pending
_SILENT_S = 10.0  # in a cluster: the server that held the consumer is gone, while our own server lives


class Position(NamedTuple):
    """The position of a delivered message, read from its reply subject."""

    num_delivered: int
    stream_sequence: int
    consumer_sequence: int
    time_ns: int  # server's clock when it was stored
    pending: int


def position(reply: str) -> Position:
    """Parse `$JS.ACK.[domain.account.]stream.consumer.deliveries.sseq.cseq.time.pending[.token]`."""
    parts = reply.split(".")
    numbers = parts[4:9] if len(parts) == 9 else parts[6:11]
    return Position(*map(int, numbers))


class Source(Protocol):
    """A source of messages, limited by credit."""

    async def start(self, credit: int) -> None:
        """Begin to receive up to `credit` messages."""

    def grant(self, count: int = 1) -> None:
        """Allow that many more messages."""

    async def close(self) -> None:
        """Receive no more."""


class Puller:
    """Pulls from one consumer for as long as there is credit.

    `grant(n)` allows n more messages. One request at a time is open for most of the credit; it is renewed when half is
    used, when it expires, after a reconnect, and by a timer in case the server forgets it.
    """

    def __init__(
        self,
        bus: Bus,
        consumer: str,  # "STREAM.NAME"
        on_message: Callable[[Msg], None],
        *,
        on_lost: Callable[[str], None] | None = None,
        on_beat: Callable[[int], None] | None = None,
        leased: bool = False,
    ) -> None:
        self._bus = bus
        self._leased = leased  # messages are leased work: messages in transit at a close are given back
        self._subject = bus.layout.call(f"CONSUMER.MSG.NEXT.{consumer}")
        self._inbox = ""
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_beat = on_beat  # is given how many messages the consumer has sent by then
        self._credit = 0  # messages allowed and not yet asked for
        self._asked = 0  # messages asked for and not yet here
        self._seen_at = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._unsubscribe: End | None = None
        self._closing: asyncio.Future[None] | None = None
        # Where the connection is down, the watch or the reconnect asks again.
        self._tasks = BackgroundTasks(lambda _: self._renew())
        self._closed = False

    async def start(self, credit: int) -> None:
        """Begin to receive up to `credit` messages."""
        self._inbox, self._unsubscribe = await self._bus.open_inbox(self._receive, drained=self._leased)
        self._bus.on_reconnect.append(self._renew)
        self._watch_silence()
        self.grant(credit)

    def grant(self, count: int = 1) -> None:
        """Allow that many more messages."""
        self._credit += count
        if self._credit > 0 and not self._closed and (self._asked == 0 or self._credit >= self._asked):
            self._ask()

    @property
    def owed(self) -> int:
        """Messages that were allowed and have not come."""
        return self._asked + self._credit

    async def close(self) -> None:
        """Stop receiving. Leased work that is on its way is given back; where the server does not confirm that in time,
        its lease has to run out.
        """
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        if self._renew in self._bus.on_reconnect:
            self._bus.on_reconnect.remove(self._renew)
        if self._closing is None and self._unsubscribe is not None and not self._bus.client.is_closed:
            self._closing = asyncio.ensure_future(self._unsubscribe())
        if self._closing is not None:
            await asyncio.shield(self._closing)  # any other caller waits for the same end

    def _ask(self) -> None:
        if not self._bus.client.is_connected:
            return  # the client would send it after the reconnect, which asks anyway: twice the credit
        loop = asyncio.get_running_loop()
        if self._asked == 0:
            self._seen_at = loop.time()  # the server's silence counts from the question
        count, self._credit = self._credit, 0
        self._asked += count
        request = {"batch": count, "expires": int(_EXPIRES_S * 1e9)}
        if self._bus.clustered:
            request["idle_heartbeat"] = int(_BEAT_S * 1e9)
        body = msgspec.json.encode(request)
        self._tasks.start(self._bus.client.publish(self._subject, body, reply=f"{self._inbox}.p"))

    async def _receive(self, message: Msg) -> None:
        self._seen_at = asyncio.get_running_loop().time()
        headers = message.headers
        if headers is not None and "Status" in headers and not message.reply.startswith("$JS.ACK"):
            self._on_status(headers)
            return
        if self._closed:
            if self._leased:  # its inbox is drained; messages without a worker are left alone
                await self._bus.send(message.reply, b"-NAK")
            return
        self._asked = max(0, self._asked - 1)
        self._on_message(message)
        if self._asked == 0 and self._credit > 0 and not self._closed:
            self._ask()

    def _on_status(self, headers: dict[str, str]) -> None:
        status = headers["Status"]
        left = int(headers.get("Nats-Pending-Messages", "0") or 0)
        if status == "100" and self._on_beat is not None:
            self._on_beat(int(headers.get("Nats-Last-Consumer", "0")))
        if status == "100" or self._closed:
            return
        description = headers.get("Description", "")
        lost = status == "503" or "onsumer Deleted" in description or "No Responders" in description
        if lost and self._on_lost is not None:
            self._on_lost(description or "consumer gone")
        if lost or description.startswith("Exceeded"):
            # Open requests are repeated later, in case the server returns (a starting server answers 503 first) or has
            # room again; an immediate repeat would get the same answer.
            asyncio.get_running_loop().call_later(_AGAIN_S, self._renew)
            return
        # 408 the request expired, 409 leadership changed: repeat the open request
        left = min(left or self._asked, self._asked)
        self._asked -= left
        self._credit += left
        if self._credit > 0:
            self._ask()

    def _renew(self) -> None:
        """The open request is lost: ask for the same number again."""
        if not self._closed:
            self._credit += self._asked
            self._asked = 0
            if self._credit > 0:
                self._ask()

    def _watch_silence(self) -> None:
        """Watch: an open request that neither delivered nor expired in time was forgotten by the server."""
        loop = asyncio.get_running_loop()
        quiet = loop.time() - self._seen_at
        limit = _SILENT_S if self._bus.clustered else _EXPIRES_S + _GRACE_S
        if self._asked and quiet >= limit:
            self._seen_at = loop.time()
            self._renew()
            if self._on_lost is not None:
                self._on_lost("no answer from the server")
            quiet = 0.0
        self._watch = loop.call_later(max(1.0, limit - quiet), self._watch_silence)
