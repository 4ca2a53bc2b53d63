"""Places of running requests, given out so that no tenant keeps the others waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable

from asyncrl.live.apis.schema import LiveError

_LEFT = 8  # one of this many places is left to others


class FairQueue:
    """Limits how many requests run at once, and how many wait.

    The tenant with the fewest running requests gets a free place, for its request that has waited longest. Where too
    many wait, the tenant with the most waiting loses the newest of them. Some places are left to others by each tenant:
    its requests may take longer than one waits.
    """

    def __init__(
        self, most: int, hold_s: float, *, waiting: int | None = None, shared: Callable[[], bool] = lambda: False
    ) -> None:
        """
        Args:
            most: requests that run at once.
            hold_s: seconds that one waits before it is refused.
            waiting: requests that wait, at most; None: as many as may run.
            shared: returns whether there are several tenants.
        """
        self._most = most
        self._most_waiting = most if waiting is None else waiting
        self._left = max(most // _LEFT, most > 1)
        self._shared = shared
        self._hold_s = hold_s
        self._under_way: Counter[str] = Counter()  # by tenant
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, the oldest first

    @property
    def waiting(self) -> int:
        """Return the number of requests without a place."""
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def hold(self, tenant: str, lost: asyncio.Future[None] | None = None) -> AsyncIterator[None]:
        """Hold a place for the length of the block, after a wait for it.

        Args:
            lost: done when the connection of the request is lost.

        Raises:
            LiveError: none became free in time, or too many requests wait.
            ConnectionError: the client is gone.
        """
        if self._under_way.total() < self._most and self._may(tenant):
            self._under_way[tenant] += 1
        else:
            await self._wait(tenant, lost)
        try:
            if lost is not None and lost.done():
                raise ConnectionResetError("the client is gone")
            yield
        finally:
            self._free(tenant)

    def _may(self, tenant: str) -> bool:
        """Return whether a tenant may have one more."""
        return self._under_way[tenant] < self._most - (self._left if self._shared() else 0)

    async def _wait(self, tenant: str, lost: asyncio.Future[None] | None) -> None:
        """Wait until a place is given; it is counted already."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def leave(_lost: object) -> None:
            if not place.done():
                place.set_exception(ConnectionResetError("the client is gone"))

        if lost is not None:
            lost.add_done_callback(leave)
        self._waiting.setdefault(tenant, deque()).append(place)
        if self.waiting > self._most_waiting:
            last = self._take(max(self._waiting, key=lambda one: len(self._waiting[one])), newest=True)
            if not last.done():  # else its client has just gone
                words = f"{self._under_way.total()} requests are running and {self._most_waiting} wait"
                last.set_exception(LiveError("overloaded", f"{words}; try again later"))
        try:
            async with asyncio.timeout(self._hold_s):
                await place
        except BaseException as error:
            line = self._waiting.get(tenant, deque())
            if place in line:
                line.remove(place)
            elif place.done() and not place.cancelled() and place.exception() is None:  # given in the same moment
                self._free(tenant)
            if isinstance(error, TimeoutError):
                words = f"{self._under_way.total()} requests have been running for {self._hold_s:g} s"
                raise LiveError("overloaded", f"{words}; try again later") from error
            raise

    def _free(self, tenant: str) -> None:
        """Count a place as free, and give it to the next one."""
        self._under_way -= Counter({tenant: 1})
        while waiting := [one for one, line in self._waiting.items() if line and self._may(one)]:
            following = min(waiting, key=lambda one: self._under_way[one])
            place = self._take(following)
            if not place.done():
                self._under_way[following] += 1
                place.set_result(None)
                return

    def _take(self, tenant: str, *, newest: bool = False) -> asyncio.Future[None]:
        line = self._waiting[tenant]
        place = line.pop() if newest else line.popleft()
        if not line:
            del self._waiting[tenant]
        return place
