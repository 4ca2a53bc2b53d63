"""Rows for waiting requests: the cached part of a prompt is copied, later steps compute the rest in parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from asyncrl.engine.embedded.budget import BLOCK, in_blocks
from asyncrl.engine.embedded.model import Block, Model
from asyncrl.engine.embedded.prefix import PrefixCache
from asyncrl.engine.embedded.request import Request

_PASS_TOKENS = 512
"""Most prompt tokens, padding included, of one forward pass."""

_PATIENCE_STEPS = 8

_Key = tuple[str | None, tuple[int, ...]]


class Admission:
    """Takes requests in their order of arrival. The members of a group share their prompt, so it is computed once:

    a member waits until the row of another member has it, and copies it then.
    """

    def __init__(self, model: Model, cache: PrefixCache) -> None:
        self._model = model
        self._cache = cache
        self._patience = 0  # steps that free rows have waited for more
        self._live: dict[_Key, Request] = {}
        self.filling: list[Request] = []  # requests with a row whose prompts are not computed to their end

    def admit(self, waiting: deque[Request], rows: range, room: int, epoch: int) -> list[Request]:
        """Move requests from `waiting` to free rows.

        Args:
            rows: the free ones.
            room: tokens that memory has room for.
        """
        self._patience = self._patience + 1 if self._is_patient(waiting, rows) else 0
        if self._patience:
            return []
        batch = self._choose(waiting, rows, room, epoch)
        for row, (request, donor, places) in zip(rows, batch, strict=False):
            request.row, request.epoch = row, epoch
            self._live[_key(request)] = request
            if donor is not None:
                self._model.copy_slot(donor.row, row, request.known)
            else:
                self._cache.load(places, row)
        admitted = [request for request, _, _ in batch]
        self.filling += [request for request in admitted if request.open_tokens]
        return admitted

    def _is_patient(self, waiting: deque[Request], rows: range) -> bool:
        """Prompts are cheaper together: a nearly full engine lets a few rows come free, unless a request is urgent."""
        few = len(rows) < min(len(waiting), 1 + rows.start // 16)
        return few and self._patience < _PATIENCE_STEPS and waiting[0].priority <= 0

    def forget(self, request: Request) -> None:
        """The request gives up its row."""
        if request in self.filling:
            self.filling.remove(request)
        if self._live.get(_key(request)) is request:
            del self._live[_key(request)]

    def next_block(self) -> Block | None:
        """Return the prompt tokens of the next forward pass; the rows know them from now on."""
        chosen: list[Request] = []
        width = 0
        for request in self.filling:
            wider = max(width, request.open_tokens)
            if chosen and wider * (len(chosen) + 1) > _PASS_TOKENS:
                break
            chosen.append(request)
            width = min(wider, _PASS_TOKENS)
        if not width:
            return None
        tokens = torch.zeros((len(chosen), width), dtype=torch.int64)
        positions = torch.full((len(chosen), width), self._model.waste)
        for index, request in enumerate(chosen):
            part = (request.prompt + request.tokens)[request.known : -1][:width]
            tokens[index, : len(part)] = torch.tensor(part)
            positions[index, : len(part)] = torch.arange(request.known, request.known + len(part))
            request.known += len(part)
        return Block(tokens, positions, torch.tensor([request.row for request in chosen]))

    def _choose(
        self, waiting: deque[Request], rows: range, room: int, epoch: int
    ) -> list[tuple[Request, Request | None, list[int]]]:
        """Return the requests with the row or the blocks that have the beginning of their tokens."""
        batch: list[tuple[Request, Request | None, list[int]]] = []
        computing = {_key(request) for request in self.filling}
        postponed: list[Request] = []
        opened = sum(request.open_tokens for request in self.filling)  # of prompts that rows have yet to compute
        while waiting and len(batch) < len(rows):
            request = waiting[0]
            if _key(request) in computing:
                postponed.append(waiting.popleft())
                continue
            # Each row may grow by a block before another one must give way.
            room -= in_blocks(len(request.prompt) + len(request.tokens)) + BLOCK
            if room < 0 and (batch or rows.start):
                break
            donor, places = self._find(request, epoch)
            if opened and opened + request.open_tokens > _PASS_TOKENS:
                break
            batch.append((waiting.popleft(), donor, places))
            opened += request.open_tokens
            if request.open_tokens:
                computing.add(_key(request))
            if not request.tokens:  # tokens that a retracted request reads again do not count as its prompt
                request.cached_tokens = request.known
        waiting.extendleft(reversed(postponed))
        return sorted(batch, key=lambda entry: entry[0].open_tokens)

    def _find(self, request: Request, epoch: int) -> tuple[Request | None, list[int]]:
        """Find the beginning of a request's tokens in a row or in the cache."""
        donor = self._live.get(_key(request))
        if donor is not None and donor.epoch == epoch:
            request.known = len(request.prompt) - 1
            return donor, []
        places = self._cache.find((request.prompt + request.tokens)[:-1], request.extra_key)
        request.known = len(places) * BLOCK
        return None, places


def _key(request: Request) -> _Key:
    return request.extra_key, tuple(request.prompt)


def enqueue(waiting: deque[Request], request: Request) -> None:
    """Queue a request after those of its priority; one that had a row before goes first."""
    if not waiting or (waiting[-1].priority >= request.priority and not request.retractions):
        waiting.append(request)
        return
    ahead = sum(
        other.priority > request.priority or (other.priority == request.priority and not request.retractions)
        for other in waiting
    )
    waiting.insert(ahead, request)


def by_loss(request: Request) -> tuple[int, int]:
    """Order requests by priority, then by the tokens to compute again if they give up their row."""
    return request.priority, len(request.prompt) + len(request.tokens)


def to_retract(running: Sequence[Request], waiting: deque[Request], free: int) -> list[Request]:
    """Return the running requests that give their rows to waiting ones of higher priority.

    Of those with the lowest priority the ones with the fewest tokens go: they have the least to compute again.

    Args:
        free: rows that no request has.
    """
    if not waiting or waiting[0].priority <= min((one.priority for one in running), default=waiting[0].priority):
        return []
    urgent = [request.priority for request in waiting][free:]
    rows = sorted(running, key=by_loss)
    pairs = zip(rows, urgent, strict=False)  # the least of those that run, with the most urgent that waits
    return [row for row, priority in pairs if row.priority < priority]
