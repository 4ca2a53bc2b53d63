"""Rows for waiting requests: what is known of a prompt is copied, the rest is computed together in the next pass."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from asyncrl.engine.embedded.model import Block, Model
from asyncrl.engine.embedded.prefix import PrefixCache
from asyncrl.engine.embedded.request import Request

_CHUNK_TOKENS = 512
"""Longest run of one prompt in a forward pass."""

_PASS_TOKENS = 2048
"""Most prompt tokens, padding included, that one step takes on, unless a single prompt has more."""

_Key = tuple[str | None, tuple[int, ...]]


class _Entry(NamedTuple):
    """A request that is about to get a row. `fed` is everything but its last token, which a decode row carries."""

    request: Request
    fed: list[int]
    donor: Request | None  # runs with the same prompt
    places: list[int]  # of cached blocks
    known: int  # tokens that need not be computed

    @property
    def open_tokens(self) -> int:
        return len(self.fed) - self.known


class Admission:
    """Takes requests in their order of arrival. The members of a group share their prompt, so it is computed once:

    a member whose prompt is being computed waits one step and copies it then, from the row of the member before it.
    """

    def __init__(self, model: Model, cache: PrefixCache) -> None:
        self._model = model
        self._cache = cache
        self._live: dict[_Key, Request] = {}

    def admit(
        self, waiting: deque[Request], first_row: int, free: int, epoch: int
    ) -> tuple[list[Request], Block | None]:
        """Move requests from `waiting` to rows `first_row`, ...; also what the next forward pass must compute."""
        entries = self._choose(waiting, free, epoch)
        entries.sort(key=lambda entry: entry.open_tokens)
        for row, entry in enumerate(entries, first_row):
            request = entry.request
            request.row = row
            request.epoch = epoch
            if not request.tokens:  # tokens that a retracted request reads again do not count as its prompt
                request.cached_tokens = entry.known
            self._live[_key(request)] = request
            if entry.donor is not None:
                self._model.copy_slot(entry.donor.row, row, entry.known)
            else:
                self._cache.load(entry.places, row)
        return [entry.request for entry in entries], self._block([entry for entry in entries if entry.open_tokens])

    def forget(self, request: Request) -> None:
        """The request gives up its row."""
        if self._live.get(_key(request)) is request:
            del self._live[_key(request)]

    def _choose(self, waiting: deque[Request], free: int, epoch: int) -> list[_Entry]:
        entries: list[_Entry] = []
        computing: set[_Key] = set()
        postponed: list[Request] = []
        longest = 0
        while waiting and len(entries) < free:
            request = waiting[0]
            if _key(request) in computing:
                postponed.append(waiting.popleft())
                continue
            entry = self._entry(request, epoch)
            longest = max(longest, entry.open_tokens)
            if entries and longest * (len(entries) + 1) > _PASS_TOKENS:
                break
            waiting.popleft()
            entries.append(entry)
            if entry.open_tokens:
                computing.add(_key(request))
        waiting.extendleft(reversed(postponed))
        return entries

    def _entry(self, request: Request, epoch: int) -> _Entry:
        fed = (request.prompt + request.tokens)[:-1]
        donor = self._live.get(_key(request))
        if donor is not None and donor.epoch == epoch:
            return _Entry(request, fed, donor, [], len(request.prompt) - 1)
        places = self._cache.find(fed, request.extra_key)
        return _Entry(request, fed, None, places, self._cache.tokens(places))

    def _block(self, entries: list[_Entry]) -> Block | None:
        """The rows are consecutive, shortest first. All but the last columns of long prompts are computed at once."""
        if not entries:
            return None
        columns = torch.arange(entries[-1].open_tokens)
        known = torch.tensor([[entry.known] for entry in entries])
        lengths = torch.tensor([[len(entry.fed)] for entry in entries])
        positions = known + columns
        positions = torch.where(positions < lengths, positions, self._model.waste)
        padded = [entry.fed[entry.known :] + [0] * (len(columns) - entry.open_tokens) for entry in entries]
        tokens = torch.tensor(padded)
        slot, done = entries[0].request.row, 0
        while len(columns) - done > _CHUNK_TOKENS:
            part = slice(done, done + _CHUNK_TOKENS)
            self._model.prefill(Block(tokens[:, part], positions[:, part], slot))
            done += _CHUNK_TOKENS
        return Block(tokens[:, done:], positions[:, done:], slot)


def _key(request: Request) -> _Key:
    return request.extra_key, tuple(request.prompt)


def enqueue(waiting: deque[Request], request: Request) -> None:
    """Put a request behind those of its priority; one that had a row before comes before all of its own."""
    if not waiting or (waiting[-1].priority >= request.priority and not request.retractions):
        waiting.append(request)
        return
    ahead = sum(
        other.priority > request.priority or (other.priority == request.priority and not request.retractions)
        for other in waiting
    )
    waiting.insert(ahead, request)


def to_retract(running: Sequence[Request], waiting: deque[Request], free: int) -> list[Request]:
    """Return the running requests that give their rows to waiting ones of higher priority.

    Of those with the lowest priority the ones with the fewest tokens go: they have the least to compute again.

    Args:
        free: rows that no request has.
    """
    if not waiting or waiting[0].priority <= min((one.priority for one in running), default=waiting[0].priority):
        return []
    urgent = [request.priority for request in waiting][free:]
    rows = sorted(running, key=lambda one: (one.priority, len(one.prompt) + len(one.tokens)))
    pairs = zip(rows, urgent, strict=False)  # the least of those that run, with the most urgent that waits
    return [row for row, priority in pairs if row.priority < priority]


class Signal:
    """A condition that wakes all waiters each time it fires."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def fire(self) -> None:
        """Wake the present waiters."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Return at the next `fire`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter
