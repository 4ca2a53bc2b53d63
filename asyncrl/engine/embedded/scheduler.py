"""Continuous batching: requests come and go between steps; running rows are always slots 0..n-1."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from asyncrl.engine.embedded.admission import Admission, by_loss, enqueue, to_retract
from asyncrl.engine.embedded.batch import Batch
from asyncrl.engine.embedded.budget import SHARE, in_blocks, token_budget
from asyncrl.engine.embedded.config import read_config, read_eos_ids
from asyncrl.engine.embedded.counters import Counters
from asyncrl.engine.embedded.memory import Memory
from asyncrl.engine.embedded.model import Model
from asyncrl.engine.embedded.prefix import PrefixCache
from asyncrl.engine.embedded.reading import read_prompt
from asyncrl.engine.embedded.request import Finish, Request, check_request
from asyncrl.engine.embedded.sampling import mix
from asyncrl.engine.embedded.stops import StopStrings
from asyncrl.engine.embedded.turns import Signal, between_steps
from asyncrl.engine.embedded.weights import ReadAhead, load_weights
from asyncrl.engine.errors import EngineError, EngineRefused

PauseMode = Literal["abort", "in_place", "retract"]

_SPINS = 2


class Engine:
    """A model, its running and waiting requests, and the controls over them. Belongs to one event loop."""

    def __init__(
        self,
        model_path: Path,
        *,
        max_running: int = 64,
        context_length: int | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int | None = None,  # of requests that bring none; None: another one each time
        memory_share: float = SHARE,  # of the free memory, for keys and values
    ) -> None:
        self.model_path = model_path
        self.config = read_config(model_path)
        self.eos = read_eos_ids(model_path)
        self.context_length = context_length or self.config.max_positions
        self.max_running = max_running
        self.dtype = dtype
        weights = load_weights(model_path, self.config, dtype)
        self.model = Model(self.config, weights, max_running, self.context_length)
        rows_tokens = max_running * in_blocks(self.context_length)
        budget = token_budget(self.config, dtype.itemsize, memory_share)
        self.budget_tokens = min(budget, 2 * rows_tokens)  # of running requests and the prefix cache
        self.cache = PrefixCache(self.model.stores, min(budget, max_running * self.context_length))
        self.memory = Memory(self.model, self.cache)
        self.ahead = ReadAhead(model_path, self.config, dtype)
        self._admission = Admission(self.model, self.cache)
        self.weight_version = "default"
        self.epoch = 0
        self.paused: PauseMode | None = None
        self._batch = Batch(self.model, max_running)
        self.running = self._batch.requests
        self.waiting: deque[Request] = deque()
        self.unread: deque[Request] = deque()  # of which the log-probs of the prompt come before all else
        self.requests: dict[str, Request] = {}
        self.counters = Counters()
        self.changed = Signal()
        self._stop_strings = StopStrings(model_path)
        self._held: deque[Request] | None = None  # arrivals while an update waits for the engine to drain
        self._updating = asyncio.Lock()
        self.computing = False
        self.later: list[Callable[[], None]] = []  # changes that wait for the end of the step
        self._young: set[Request] = set()  # must not stop yet
        self._random = random.Random(seed)

    @property
    def runnable(self) -> bool:
        """Return whether a step would do something."""
        return self.paused is None and self.memory.whole and bool(self.running or self.waiting or self.unread)

    @property
    def idle(self) -> bool:
        """Nothing runs, and nothing waits but what came since it is paused: SGLang keeps that at its door."""
        return not self.computing and all(request.late for request in self.requests.values())

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            EngineRefused: the prompt does not fit, a token is not in the vocabulary, the id is in use, or a stop
                string is asked for without a tokenizer.
        """
        self.check(request)
        given = request.sampling.sampling_seed
        mixed = None if given is None else int(mix(np.array([given % 2**64], np.uint64))[0])
        seed = self._random.getrandbits(64) if mixed is None else mixed
        request.accept(room=self.context_length - len(request.prompt), eos=self.eos, seed=seed)
        self.counters.requests += 1
        self.counters.prompt_tokens += len(request.prompt)
        if request.limit == 0 and request.scores is None:
            request.finish = Finish("length", length=0)
            request.emit()
            return
        self.requests[request.rid] = request
        request.late = self.paused is not None
        self._queue(request) if self._held is None else self._held.append(request)
        self.changed.fire()

    def _queue(self, request: Request) -> None:
        unread = request.scores is not None and request.scores.open
        self.unread.append(request) if unread else enqueue(self.waiting, request)

    def check(self, request: Request) -> None:
        """Refuse what could never run; raises as `submit` does."""
        check_request(request, self.config.vocab_size, self.context_length, self.eos)
        if len(request.prompt) >= self.budget_tokens:
            raise EngineRefused(
                f"request {request.rid}: its prompt has {len(request.prompt)} tokens, and the memory for keys and "
                f"values holds {self.budget_tokens}; free memory on the engine's host, raise --mem-fraction-static in "
                "engine.arguments, or send a shorter prompt"
            )
        if request.rid in self.requests:
            raise EngineRefused(f"Duplicate request ID detected: {request.rid}")
        if request.sampling.stop:
            self._stop_strings.check()

    @between_steps
    def abort(self, rid: str) -> None:
        """End one request with its tokens so far, at the latest after this step; an unknown id is no fault."""
        request = self.requests.get(rid)
        if request is None:
            return
        if request.row >= 0:
            self._end(request, Finish("abort", message="Aborted"))
            return
        for queue in (self.waiting, self.unread, self._held):
            if queue is not None and request in queue:
                queue.remove(request)
        self._end(request, Finish("abort", message="Abort in waiting queue"))

    @between_steps
    def abort_all(self) -> None:
        """End every running or waiting request with its tokens so far, at the latest after this step."""
        for row in reversed(range(len(self.running))):
            self._end(self.running[row], Finish("abort", message="Aborted"))
        for queue in (self.waiting, self.unread, self._held):
            while queue:
                self._end(queue.popleft(), Finish("abort", message="Abort in waiting queue"))

    @between_steps
    def pause(self, mode: PauseMode) -> None:
        """Stop after this step. `abort` ends all requests, `in_place` freezes them, `retract` sends them back."""
        if mode == "abort":
            self.abort_all()
        elif mode == "retract":
            for request in reversed(list(self.running)):
                self._retract(request)
        self.paused = mode
        self.changed.fire()

    @between_steps
    def resume(self) -> None:
        """Step again."""
        self.paused = None
        for request in self.requests.values():
            request.late = False
        self.changed.fire()

    async def settled(self) -> None:
        """Return when no step is computing, and all changes are made that waited for its end."""
        while self.computing:
            await self.changed.wait()

    def flush_cache(self) -> bool:
        """Forget all prefixes; false, and nothing done, while requests hold keys and values or are about to."""
        if self.computing or self.running or ((self.waiting or self.unread) and self.paused is None):
            return False
        self.cache.clear()
        return True

    async def update_weights(
        self, source: Path | Mapping[str, torch.Tensor], version: str | None, *, flush: bool
    ) -> None:
        """Swap the weights for those in a directory, or for tensors by name; on a fault the old ones stay.

        A paused engine swaps at once. A running request first finishes while later requests wait, as in SGLang.

        Raises:
            EngineRefused: `flush` while requests are frozen in place: their keys and values cannot be dropped.
            EngineError: the weights cannot be read or have another shape.
        """
        async with self._updating:
            await self._drain()
            try:
                if flush and self.running:
                    raise EngineRefused(
                        f"{len(self.running)} requests are paused in place and hold keys and values; "
                        "send flush_cache false, or pause with abort or retract"
                    )
                self._swap(source, version)
            finally:
                held, self._held = self._held or (), None
                for request in held:
                    self._queue(request)
                self.changed.fire()

    async def _drain(self) -> None:
        self._held = deque()
        while self.runnable or self.computing:
            await self.changed.wait()

    def _swap(self, source: Path | Mapping[str, torch.Tensor], version: str | None) -> None:
        started, path = time.perf_counter(), source if isinstance(source, Path) else self.model_path
        if isinstance(source, Path) and (source / "config.json").exists() and read_config(source) != self.config:
            raise EngineError(f"weights {source}: config.json differs from the served model's, {self.model_path}")
        weights = self.ahead.take(source)
        for request in (*self.running, *self.waiting):
            if request.streaming and request.tokens and not request.wants_emission():
                request.emit()  # so that no event mixes tokens of two versions
            request.close_span(self.weight_version)
        self.memory.fill(weights)
        self.model_path = path
        self.weight_version = self.weight_version if version is None else version
        self.epoch += 1
        self.cache.clear()  # also without `flush`: requests for the new weights must not meet what others computed
        self.counters.weight_load_s = time.perf_counter() - started

    async def run(self) -> None:
        """Step for ever, inside the event loop, which has turns during long steps; asleep when there is no work."""
        while True:
            if not self.runnable:
                await self.changed.wait()
                continue
            self.computing = True
            try:
                for _ in self._step():
                    await asyncio.sleep(0)
            finally:
                self.computing = False
            while self.later:
                self.later.pop(0)()
            self.changed.fire()
            for _ in range(_SPINS):  # reading a socket, then starting its handler, takes two turns of the loop
                await asyncio.sleep(0)

    def step(self) -> None:
        """Read one prompt, admit what waits, then sample one token for every running request."""
        for _ in self._step():
            pass

    @torch.inference_mode()
    def _step(self) -> Iterator[None]:
        """Make a step. It stops where the event loop may have a turn, in which requests may come, but none may end."""
        yield from self._read_prompt()
        self._admit()
        self._make_room()
        if not self.running:
            return
        block = self._admission.next_block()
        filling = self._admission.filling
        self._batch.feed(filling)
        filling[:] = [request for request in filling if request.open_tokens]  # of the others, the sample counts
        rows, count = self._batch.rows, len(self.running)
        logits = yield from self.model.decode(rows.tokens[:count], rows.positions[:count], block)
        if self._young:
            self._hold_back_stops(logits)
        sampled = rows.sample(logits)
        self.model.check_finite(sampled.probs, rows.positions[:count], self.weight_version)
        rows.advance(sampled)
        touched = []
        tokens, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
        for request, token, logprob in zip(self.running, tokens, logprobs, strict=True):
            if filling and request in filling:
                request.known += 1  # the step fed a token of its prompt, and what follows it is given
                continue
            request.tokens.append(token)
            request.logprobs.append(logprob)
            if request.top:
                request.top_logprobs.append(rows.likeliest(sampled, request.row, request.top))
            if token in request.stops or len(request.tokens) >= request.check_at:
                touched.append(request)
        self.counters.stepped(count - len(filling))
        for request in touched[::-1]:
            self._review(request)

    def _read_prompt(self) -> Iterator[None]:
        """Compute the log-probs of a prompt, in the slot after those that run, if there is one and memory."""
        if not self.unread or len(self.running) >= self.max_running:
            return
        request = self.unread[0]
        assert request.scores is not None
        rest = self.budget_tokens - in_blocks(len(request.prompt))
        rest -= self._batch.held_tokens(self._admission.filling)
        if rest < 0 and self.running:
            return
        self.unread.popleft()
        self.cache.limit(rest)
        slot = len(self.running)
        yield from read_prompt(self.model, request.prompt, slot, request.scores)
        self.model.free(slot, 0, len(request.prompt))
        if request.limit == 0:
            self._end(request, Finish("length", length=0))
        else:
            enqueue(self.waiting, request)

    def _hold_back_stops(self, logits: torch.Tensor) -> None:
        for request in list(self._young):
            if len(request.tokens) >= request.sampling.min_new_tokens:
                self._young.discard(request)
            else:
                logits[request.row, list(request.stops)] = -torch.inf

    def _review(self, request: Request) -> None:
        token = request.tokens[-1]
        if token in request.stops:
            self._end(request, Finish("stop", matched=token))
        elif request.sampling.stop and (matched := self._stop_strings.found(request)) is not None:
            self._end(request, Finish("stop", matched=matched))
        elif len(request.tokens) >= request.limit:
            self._end(request, Finish("length", length=len(request.tokens)))
        else:
            if request.wants_emission():
                request.emit()
            request.plan_check()

    def _admit(self) -> None:
        count = len(self.running)
        for request in to_retract(self.running, self.waiting, self.max_running - count):
            self._retract(request)
        count = len(self.running)
        if not self.waiting or count == self.max_running:
            return
        room = self.budget_tokens - self._batch.held_tokens(self._admission.filling)
        batch = self._admission.admit(self.waiting, range(count, self.max_running), room, self.epoch)
        now = time.perf_counter()
        for request in batch:
            if request.admitted_s is None:
                request.admitted_s = now
                self.counters.cached_tokens += request.cached_tokens
            if request.sampling.min_new_tokens and request.stops:
                self._young.add(request)
            self._batch.add(request)

    def _make_room(self) -> None:
        """Drop prefixes, then send requests back, until the next step's keys and values have memory."""
        while (held := self._batch.held_tokens(self._admission.filling)) > self.budget_tokens:
            if len(self.running) == 1:
                self._end(self.running[0], Finish("length", length=len(self.running[0].tokens)))
            else:
                self._retract(min(self.running, key=by_loss))
        self.cache.limit(self.budget_tokens - held)

    def _end(self, request: Request, finish: Finish) -> None:
        """Take a request out, and notify its listener."""
        request.finish = finish
        request.close_span(self.weight_version)
        del self.requests[request.rid]
        if request.row >= 0:
            if request.routed is not None:
                request.routed = self.model.routed(request.row, len(request.prompt) + len(request.tokens) - 1)
            self._leave_row(request)
        self.counters.ended(request)
        request.emit()
        self.changed.fire()

    def _retract(self, request: Request) -> None:
        """Return a running request to the queue with its tokens; it continues when a row is free again."""
        self._leave_row(request)
        request.retractions += 1
        self.counters.retractions += 1
        enqueue(self.waiting, request)

    def _leave_row(self, request: Request) -> None:
        """Free its row; its keys and values stay for requests that share the prefix."""
        self._young.discard(request)
        if request.epoch == self.epoch:
            end = request.known if request in self._admission.filling else -1
            self.cache.limit(self.budget_tokens - self._batch.held_tokens(self._admission.filling))
            self.cache.save((request.prompt + request.tokens)[:end], request.extra_key, request.row)
        self._admission.forget(request)
        self._batch.remove(request)
