"""Listening to a log: its messages in order, decoded, with the bodies that lie in the blob stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from asyncrl.bus.blobs import BLOB, BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import body_of, unpack
from asyncrl.bus.sealing import open_body
from topics.topic import Stream, Topic
from topics.wire import SEALED, WireError

_AT_ONCE = 16  # messages that are opened before others of the process have their turn
_SILENT_S = 60.0  # without a message, of a log that is not read to its end

Take: TypeAlias = Callable[[Topic[Any], Any, Record], None]  # the message, or its headers where only these are read
Refuse: TypeAlias = Callable[[Record, Exception], None]


class Listener:
    """Hands every message of a log to `take`, in order; invalid messages go to `refuse`.

    Bodies in the blob stream are fetched first and encrypted ones decrypted; later messages wait. Messages whose data
    key is gone are skipped. A LookupError or ValueError from `take` means that a message is invalid.
    """

    def __init__(
        self,
        bus: Bus,
        stream: Stream,
        take: Take,
        refuse: Refuse,
        *,
        subjects: Sequence[str] = (),
        headers_only: bool = False,
        unread: Callable[[Record], bool] = lambda _: False,
        newest: bool = False,
    ) -> None:
        self.last = 0  # sequence of the newest message handed over
        self._bus = bus
        self._take, self._refuse = take, refuse
        self._headers_only = headers_only
        self._unread = unread  # whether only the headers of a record are read: its body is neither fetched nor opened
        self._reader = LogReader(
            bus, stream, self.subscribe, subjects=subjects, headers_only=headers_only, newest=newest
        )
        self._late: deque[Record] = deque()  # not yet handed over
        self._handing: asyncio.Task[None] | None = None

    async def start(self, after: int = 0) -> None:
        """Begin to listen after a sequence.

        Raises:
            BusError: the stream is not there, or may not be read.
        """
        self.last = self._reader.last = after
        await self._reader.start()

    async def close(self) -> None:
        """Listen no more; what waits is not handed over."""
        if self._handing is not None:
            self._handing.cancel()
        await self._reader.close()

    async def caught_up(self) -> None:
        """Wait until everything was handed over that was there at the start.

        Raises:
            BusGone: the server sends nothing more, or a body cannot be fetched.
        """
        await self._reader.wait(lambda: False, _SILENT_S)
        await self.handed_over()

    async def handed_over(self) -> None:
        """Wait until everything that came was handed over."""
        if self._handing is not None:
            await asyncio.shield(self._handing)

    @property
    def waits(self) -> bool:
        """Return whether a message waits for its body or one before it."""
        return bool(self._late)

    def subscribe(self, record: Record) -> None:
        """Hand a record over in its turn."""
        if not (self._late or self._lies_elsewhere(record)):
            self._hand_over(record)
            return
        self._late.append(record)
        if self._handing is None or self._handing.done():
            self._handing = self._bus.readers.start(self._hand_over_late())

    async def _hand_over_late(self) -> None:
        while self._late:
            record = self._late[0]
            try:
                if self._lies_elsewhere(record):
                    record = record._replace(data=await self._body(record))
            except SecretGone:
                self.last = record.sequence
            except (WireError, BlobMissing) as error:
                self.last = record.sequence
                self._refuse(record, error)
            else:
                self._hand_over(record)
            self._late.popleft()
            if record.sequence % _AT_ONCE == 0:  # available messages are opened without a wait
                await asyncio.sleep(0)

    def _hand_over(self, record: Record) -> None:
        self.last = record.sequence
        try:
            body = None if self._by_headers(record) else record.data
            self._take(*unpack(record, body, self._bus.tables), record)
        except (LookupError, ValueError) as error:  # a WireError, or invalid values
            self._refuse(record, error)

    def _by_headers(self, record: Record) -> bool:
        return self._headers_only or self._unread(record)

    def _lies_elsewhere(self, record: Record) -> bool:
        return (BLOB in record.headers or SEALED in record.headers) and not self._by_headers(record)

    async def _body(self, record: Record) -> bytes:
        body, topic = await body_of(self._bus, record), self._bus.tables.topic_of(record.subject)
        return body if topic is None else await open_body(self._bus, topic, record, body)
