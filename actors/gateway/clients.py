"""Connections of clients: what a request does when its own is lost, and the turns that end with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence

from aiohttp import web
from aiohttp.typedefs import Middleware

from actors.gateway.reply import Answered
from actors.gateway.turn import Turn
from asyncrl.live.apis.schema import LiveError
from asyncrl.live.turn_log import Asked

_LOST = web.RequestKey("lost", asyncio.Future)  # done when the connection of a request is lost


class Requests:
    """The running requests."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[web.StreamResponse]] = set()

    def outlasting(self) -> Middleware:
        """Return what lets a request run on when its connection is lost, so that its begun turns are stored as ended.

        `lost_of` is done in that moment, and not only when something is sent next.
        """

        @web.middleware
        async def outlasting(request: web.Request, handler: Answered) -> web.StreamResponse:
            lost = request[_LOST] = asyncio.get_running_loop().create_future()
            work = asyncio.ensure_future(handler(request))
            self._running.add(work)
            work.add_done_callback(self._running.discard)
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                lost.set_result(None)
                await asyncio.wait([work])
                if not work.cancelled():
                    work.exception()  # its client gets no answer
                raise

        return outlasting

    async def ended(self) -> None:
        """Wait until no request runs."""
        while self._running:
            await asyncio.wait([*self._running])


def lost_of(http: web.Request) -> asyncio.Future[None]:
    """Return the future that is done when the connection of a request is lost."""
    return http[_LOST]


class Leaving:
    """Running turns and their clients: a request that repeats a turn whose client is gone waits for its tokens."""

    def __init__(self, hold_s: float) -> None:
        """
        Args:
            hold_s: seconds that a request waits for them at most.
        """
        self._hold_s = hold_s
        self._ends: dict[asyncio.Future[None], set[str]] = {}  # with the digests of the requests
        self._lost: dict[str, asyncio.Future[None]] = {}  # of the running turns
        self._turns: dict[str, Turn] = {}  # running

    @contextlib.contextmanager
    def watched(self, turns: Sequence[Turn], lost: asyncio.Future[None]) -> Iterator[None]:
        """End the turns of a request when its connection is lost; at the end of the block they have ended."""
        ended = asyncio.get_running_loop().create_future()

        def leave(_lost: object) -> None:
            if ended.done():  # in the moment in which the connection was lost
                return
            self._ends[ended] = {turn.digest for turn in turns}
            for turn in turns:
                turn.leave(ConnectionResetError("the client is gone"))

        lost.add_done_callback(leave)
        self._lost |= dict.fromkeys([turn.id for turn in turns], lost)
        self._turns |= {turn.id: turn for turn in turns}
        try:
            yield
        finally:
            for turn in turns:
                self._lost.pop(turn.id, None)
                self._turns.pop(turn.id, None)
            lost.remove_done_callback(leave)
            self._ends.pop(ended, None)
            ended.set_result(None)

    def interrupt(self) -> None:
        """End all running turns: the gateway stops."""
        for turn in self._turns.values():
            turn.leave(LiveError("overloaded", "the gateway stops before this reply is whole; ask again", retry_s=1))

    def has_client(self, turn: str) -> bool:
        """Return whether a turn is running here, and the connection of its client is not lost."""
        lost = self._lost.get(turn)
        return lost is not None and not lost.done()

    async def ended(self, requests: Iterable[Asked], lost: asyncio.Future[None]) -> None:
        """Wait for the ends of those that a request repeats, no longer than its own connection lasts."""
        digests = {request.digest for request in requests}
        ends = [end for end, theirs in self._ends.items() if not digests.isdisjoint(theirs)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._hold_s):
                for end in ends:
                    await asyncio.wait([end, lost], return_when=asyncio.FIRST_COMPLETED)
