"""Continuous batching: requests come and go between steps; running rows are always slots 0..n-1."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tokenizers import Tokenizer

from asyncrl.engine.answer import stop_string
from asyncrl.engine.embedded.admission import Admission, Signal, enqueue, to_retract
from asyncrl.engine.embedded.config import read_config, read_eos_ids
from asyncrl.engine.embedded.counters import Counters
from asyncrl.engine.embedded.memory import Memory
from asyncrl.engine.embedded.model import SPAN_ROWS, Block, Model
from asyncrl.engine.embedded.prefix import PrefixCache
from asyncrl.engine.embedded.reading import read_prompt
from asyncrl.engine.embedded.request import Finish, Request, check_length
from asyncrl.engine.embedded.sampling import GREEDY, PLAIN, TRUNCATED, Rows, mix
from asyncrl.engine.embedded.weights import ReadAhead, load_weights
from asyncrl.engine.errors import EngineError, EngineRefused

PauseMode = Literal["abort", "in_place", "retract"]

_PATIENCE_STEPS = 8
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
        weight_version: str = "default",
        seed: int | None = None,  # of requests that bring none; None: another one each time
    ) -> None:
        self.model_path = model_path
        self.config = read_config(model_path)
        self.eos = read_eos_ids(model_path)
        self.context_length = context_length or self.config.max_positions
        self.max_running = max_running
        self.dtype = dtype
        weights = load_weights(model_path, self.config, dtype)
        self.model = Model(self.config, weights, max_running, self.context_length)
        self.cache = PrefixCache(self.model.stores, max_running * self.context_length)
        self.memory = Memory(self.model, self.cache)
        self.ahead = ReadAhead(model_path, self.config, dtype)
        self._admission = Admission(self.model, self.cache)
        self.weight_version = weight_version
        self.epoch = 0
        self.paused: PauseMode | None = None
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.unread: deque[Request] = deque()  # of which the log-probs of the prompt come before all else
        self.requests: dict[str, Request] = {}
        self.counters = Counters()
        self.changed = Signal()
        self._tokenizer: Tokenizer | None = None
        self._held: deque[Request] | None = None  # arrivals while an update waits for the engine to drain
        self._updating = asyncio.Lock()
        self._young: set[Request] = set()  # must not stop yet
        self._patience = 0
        self._rows = Rows(max_running)
        self._random = random.Random(seed)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, read when it is first needed.

        Raises:
            EngineRefused: the model directory has none.
        """
        if self._tokenizer is None:
            path = self.ahead.model / "tokenizer.json"
            if not path.exists():
                raise EngineRefused(f"stop strings need {path}, which does not exist; use stop_token_ids")
            self._tokenizer = Tokenizer.from_file(str(path))
        return self._tokenizer

    @property
    def runnable(self) -> bool:
        """Return whether a step would do something."""
        return self.paused is None and self.memory.whole and bool(self.running or self.waiting or self.unread)

    @property
    def idle(self) -> bool:
        """Nothing runs, and nothing waits but what came since it is paused: SGLang keeps that at its door."""
        return all(request.late for request in self.requests.values())

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
        prompt, vocab = request.prompt, self.config.vocab_size
        if not prompt:
            raise EngineRefused(f"request {request.rid}: input_ids is empty; give at least one token")
        check_length(len(prompt), request.sampling.max_new_tokens, self.context_length)
        if min(prompt) < 0 or max(prompt) >= vocab:
            wrong = next(token for token in prompt if not 0 <= token < vocab)
            raise EngineRefused(f"request {request.rid}: token id {wrong} is outside the vocabulary of {vocab}")
        for token in request.sampling.stop_token_ids:
            if not 0 <= token < vocab:
                raise EngineRefused(f"request {request.rid}: stop id {token} is outside the vocabulary of {vocab}")
        if request.sampling.min_new_tokens and len({*request.sampling.stop_token_ids, *self.eos}) >= vocab:
            raise EngineRefused(f"request {request.rid}: min_new_tokens, and every token of {vocab} is a stop id")
        if request.rid in self.requests:
            raise EngineRefused(f"Duplicate request ID detected: {request.rid}")
        if request.sampling.stop:
            _ = self.tokenizer

    def abort(self, rid: str) -> None:
        """End one request with what it has; an unknown id is no fault."""
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

    def abort_all(self) -> None:
        """End everything that runs or waits with what it has."""
        for row in reversed(range(len(self.running))):
            self._end(self.running[row], Finish("abort", message="Aborted"))
        for queue in (self.waiting, self.unread, self._held):
            while queue:
                self._end(queue.popleft(), Finish("abort", message="Abort in waiting queue"))

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping. `abort` ends all requests, `in_place` freezes them, `retract` sends them back to the queue."""
        if mode == "abort":
            self.abort_all()
        elif mode == "retract":
            for request in reversed(list(self.running)):
                self._retract(request)
        self.paused = mode
        self.changed.fire()

    def resume(self) -> None:
        """Step again."""
        self.paused = None
        for request in self.requests.values():
            request.late = False
        self.changed.fire()

    def flush_cache(self) -> bool:
        """Forget all prefixes; false, and nothing done, while requests hold keys and values or are about to."""
        if self.running or ((self.waiting or self.unread) and self.paused is None):
            return False
        self.cache.clear()
        return True

    async def update_weights(
        self, source: Path | Mapping[str, torch.Tensor], version: str | None, *, flush: bool
    ) -> None:
        """Swap the weights for those in a directory, or for tensors by name; on a fault the old ones stay.

        A paused engine swaps at once. A running one first finishes what it has while later requests wait, as SGLang.

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
                self._swap(source, version, flush=flush)
            finally:
                held, self._held = self._held or (), None
                for request in held:
                    self._queue(request)
                self.changed.fire()

    async def _drain(self) -> None:
        self._held = deque()
        while self.runnable:
            await self.changed.wait()

    def _swap(self, source: Path | Mapping[str, torch.Tensor], version: str | None, *, flush: bool) -> None:
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
        if flush:
            self.cache.clear()
        self.counters.weight_load_s = time.perf_counter() - started

    async def run(self) -> None:
        """Step for ever, inside the event loop; asleep while there is nothing to do."""
        while True:
            if self.runnable:
                self.step()
                for _ in range(_SPINS):  # reading a socket, then starting its handler, takes two turns of the loop
                    await asyncio.sleep(0)
            else:
                await self.changed.wait()

    @torch.inference_mode()
    def step(self) -> None:
        """Read one prompt, admit what waits, then sample one token for every running request."""
        if self.unread and len(self.running) < self.max_running:
            self._read_prompt(self.unread.popleft())
        if not (self.running or self.waiting):
            return
        block = self._admit()
        running, count = self.running, len(self.running)
        logits = self.model.decode(self._rows.tokens[:count], self._rows.positions[:count], block)
        if self._young:
            self._hold_back_stops(logits)
        sampled = self._rows.sample(logits)
        self._rows.advance(sampled)
        touched = []
        for request, token, logprob in zip(running, sampled.tokens.tolist(), sampled.logprobs.tolist(), strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)
            if request.top:
                request.top_logprobs.append(self._rows.likeliest(sampled, request.row, request.top))
            if token in request.stops or len(request.tokens) >= request.check_at:
                touched.append(request)
        self.counters.stepped(count)
        for request in touched[::-1]:
            self._review(request)

    def _read_prompt(self, request: Request) -> None:
        """Compute the log-probs of a prompt, in the slot behind those that run."""
        assert request.scores is not None
        read_prompt(self.model, request.prompt, len(self.running), request.scores)
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
        elif request.sampling.stop and (matched := self._stop_string(request)) is not None:
            self._end(request, Finish("stop", matched=matched))
        elif len(request.tokens) >= request.limit:
            self._end(request, Finish("length", length=len(request.tokens)))
        else:
            if request.wants_emission():
                request.emit()
            request.plan_check()

    def _stop_string(self, request: Request) -> str | None:
        if len(request.tokens) < request.sampling.min_new_tokens:
            return None
        return stop_string(
            request.tokens, request.sampling.stop, lambda tail: self.tokenizer.decode(tail, skip_special_tokens=False)
        )

    def _admit(self) -> Block | None:
        free = self.max_running - len(self.running)
        for request in to_retract(self.running, self.waiting, free):
            self._retract(request)
            free += 1
        if not self.waiting or not free:
            return None
        self._patience = self._patience + 1 if self._is_patient(free) else 0
        if self._patience:
            return None
        batch, block = self._admission.admit(self.waiting, len(self.running), free, self.epoch)
        now = time.perf_counter()
        for request in batch:
            if request.admitted_s is None:
                request.admitted_s = now
                self.counters.cached_tokens += request.cached_tokens
            if request.sampling.min_new_tokens and request.stops:
                self._young.add(request)
            self._place(request)
        self.running += batch
        return block

    def _is_patient(self, free: int) -> bool:
        """Prompts are cheaper together: a nearly full engine lets a few rows come free, unless a request is urgent."""
        few = free < min(len(self.waiting), 1 + len(self.running) // 16)
        return few and self._patience < _PATIENCE_STEPS and self.waiting[0].priority <= 0

    def _place(self, request: Request) -> None:
        sampling, vocab = request.sampling, self.config.vocab_size
        cut = sampling.top_p < 1.0 or sampling.min_p > 0.0 or 0 <= sampling.top_k < vocab
        greedy = sampling.temperature == 0.0 or sampling.top_k == 1
        self._rows.records[request.row] = (
            request.tokens[-1] if request.tokens else request.prompt[-1],
            len(request.prompt) + len(request.tokens) - 1,
            request.seed,
            GREEDY if greedy else TRUNCATED if cut else PLAIN,
            sampling.temperature or 1.0,
            sampling.top_p,
            sampling.top_k if sampling.top_k > 0 else vocab,
            sampling.min_p,
        )

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
        """Send a running request back to the queue with its tokens; it goes on when there is a row for it again."""
        self._leave_row(request)
        request.retractions += 1
        self.counters.retractions += 1
        enqueue(self.waiting, request)

    def _leave_row(self, request: Request) -> None:
        """Free its row; its keys and values stay for requests that share the prefix."""
        self._young.discard(request)
        if request.epoch == self.epoch:
            self.cache.save((request.prompt + request.tokens)[:-1], request.extra_key, request.row)
        self._admission.forget(request)
        self._vacate(request.row)
        request.row = -1

    def _vacate(self, row: int) -> None:
        """Close the hole at `row`. Each span gives its longest row to the one before it, so that rows stay sorted."""
        positions, count = self._rows.records["position"], len(self.running)
        for start in range((row // SPAN_ROWS + 1) * SPAN_ROWS, count, SPAN_ROWS):
            donor = start + int(positions[start : min(start + SPAN_ROWS, count)].argmax())
            self._move(donor, row)
            row = donor
        if row != count - 1:
            self._move(count - 1, row)
        self.running.pop()

    def _move(self, source: int, target: int) -> None:
        self.model.copy_slot(source, target, int(self._rows.records["position"][source]))
        self._rows.records[target] = self._rows.records[source]
        self.running[target] = self.running[source]
        self.running[target].row = target
