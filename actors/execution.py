"""One trajectory on a rollout worker: run its function, keep its progress, say its result."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from actors.actor import Context
from actors.engines import Engine, EnginePool, version_of
from actors.failures import say_failure
from actors.progress import Progress
from actors.progress_log import ProgressLog, ProgressReader
from actors.suspects import Suspects
from actors.worker import Delivery
from asyncrl.bus.errors import BusError
from asyncrl.bus.group_rows import GroupRows, RowsUnreadable
from asyncrl.bus.talk import Fenced
from asyncrl.engine.client import Chunk, EngineRefused, EngineUnavailable, SamplingParams
from asyncrl.tasks.functions import last_lines
from asyncrl.tasks.journal import Diverged, Tape
from asyncrl.tasks.rollout import Limits, RolloutContext, RolloutFunction
from asyncrl.tasks.tokens import TaskTokenizer, TokenizerError
from topics.prompts import PromptIssued, PromptRow
from topics.trajectories import (
    Answer,
    FailureReason,
    Segment,
    TrajectoryGenerated,
    count_versions,
)
from topics.wire import Float32Array, Int32Array

_QUIET_TOKENS = 64  # longer generations are streamed, so that one sees them advance


class RolloutFailed(Exception):
    """The user's rollout function raised."""


class Tools(NamedTuple):
    """What every trajectory of a worker shares."""

    context: Context
    pool: EnginePool
    tokenizer: TaskTokenizer
    function: RolloutFunction
    under_way: set[Progress]
    suspects: Suspects
    rows: GroupRows
    model_context: int  # tokens that the trained model takes
    log: ProgressLog
    reader: ProgressReader


class Execution:
    """One trajectory on this worker: the host of its rollout context."""

    def __init__(self, tools: Tools, issued: PromptIssued, delivery: Delivery[PromptIssued]) -> None:
        self._tools = tools
        self._context = tools.context
        self._settings = tools.context.cast.rollout
        self._issued = issued
        self._delivery = delivery
        self._progress = self._open_progress()

    async def run(self, *, look: bool) -> bool:
        """Run the rollout function and publish what came of it; True when the work is done and said.

        Args:
            look: whether somebody may have worked on it before.
        """
        progress = self._progress
        try:
            if look and await progress.look():
                return True
            if self._delivery.at.deliveries > 1:
                if self._issued.stage == "rl":
                    await self._engine_there()  # before that nothing of it runs, and its end would count for nothing
                if self._tools.suspects.doubts(progress.fruitless):
                    poison = await self._tools.suspects.alone(self._delivery, self._came_to)
                    return bool(poison) and await self._say_failure("poison", poison)
                await progress.hold()  # from here on nothing of whoever had it before passes the fence
            failed = await self._attempt()
            if failed is None:
                return True
            return await self._say_failure(*failed)
        except Fenced:
            self._context.count("fenced")
            return await progress.is_generated()
        except asyncio.CancelledError:
            leaves = self._context.stop.is_set() and self._delivery.verdict is None
            if leaves and (progress.unkept or progress.is_in_vain):
                # Asked to leave: whoever comes next goes on from here, and does not count this run as a death. The
                # fence may already hold what was being published when this came; then there is nothing to add.
                with contextlib.suppress(Fenced):
                    await progress.keep()
            raise
        finally:
            progress.close()

    async def _attempt(self) -> tuple[FailureReason, str] | None:
        """Run the rollout function and publish its result, or say why there can be none."""
        try:
            rows = await self._tools.rows.of(self._issued)
            if self._issued.stage == "warmup":
                await self._say_result([], self._supervised(rows), "", truncated=False)
            else:
                self._tools.under_way.add(self._progress)
                await self._roll_out(rows)
        except Diverged as error:
            return "diverged", str(error)
        except (EngineRefused, RowsUnreadable, TokenizerError) as error:
            return "refused", str(error)
        except RolloutFailed as error:
            return "rollout", str(error)
        finally:
            self._tools.under_way.discard(self._progress)
        return None

    async def _say_failure(self, reason: FailureReason, detail: str) -> bool:
        return await say_failure(self._context, self._issued, self._delivery, reason, detail)

    def _open_progress(self) -> Progress:
        return Progress(self._context, self._issued, self._delivery, self._tools.log, self._tools.reader)

    async def _came_to(self) -> int:
        """How far it has come, with whichever worker."""
        progress = self._open_progress()
        await progress.look()
        return progress.came_to

    async def _engine_there(self) -> None:
        """Wait until an engine could take a request."""
        self._tools.pool.release(await self._choose_engine())

    async def _choose_engine(self) -> Engine:
        with self.waiting(f"an engine with version {self._issued.min_version}"):
            return await self._tools.pool.choose(self._issued.min_version)

    async def sample(self, input_ids: Int32Array, answer: Answer, limits: Limits) -> None:
        """Extend an open answer until it is done: over weight updates, engine restarts, and from others' partials."""
        while True:
            budget = limits.max_new_tokens - len(answer.tokens)
            if budget <= 0:
                answer.done, answer.finish = True, "length"
                return
            if self._progress.unkept + min(budget, self._quiet) > self._settings.progress_limit:
                await self.keep()  # a short request tells nothing while it is under way
            engine = await self._choose_engine()
            self._delivery.advanced()
            self._delivery.place = engine.engine_id
            try:
                finish = await self._sample_on(engine, input_ids, answer, limits)
            except EngineUnavailable as error:
                self._context.count("engine_unavailable")
                self._context.log.warning("engine unavailable", engine=engine.engine_id, reason=str(error))
                self._tools.pool.suspect(engine)
                continue
            finally:
                self._tools.pool.release(engine)
                self._delivery.place = ""
            self._delivery.advanced()
            if finish != "abort":
                answer.done, answer.finish = True, finish
                return
            self._context.count("resumed")

    async def _roll_out(self, rows: list[PromptRow]) -> None:
        issued, tools = self._issued, self._tools
        limits = Limits(self._settings.max_new_tokens, self._settings.stop)
        rollout = RolloutContext(
            tools.tokenizer,
            self._progress.journal,
            self,
            seed=issued.seed,
            limits=limits,
            tool_limit_s=self._settings.tool_limit_s,
        )
        token = self._progress.journal.begin()
        try:
            await tools.function(rows[0], rollout)
        except (Diverged, Fenced, EngineRefused, TokenizerError, BusError):
            raise
        except (Exception, SystemExit) as error:  # whatever a user's function raises is data, no fault of the worker
            raise RolloutFailed(last_lines(error)) from error
        finally:
            self._progress.journal.end(token)
        segments = rollout.segments()
        if not segments:
            raise RolloutFailed("the rollout function ended without a generate; there is nothing to train on")
        await self._say_result(rows, segments, rollout.sampled_text(), truncated=rollout.truncated)

    async def _sample_on(self, engine: Engine, input_ids: Int32Array, answer: Answer, limits: Limits) -> str:
        """One request to one engine; returns how it ended: "stop", "length" or "abort"."""
        assert engine.ready is not None
        ready, settings = engine.ready, self._settings
        budget = limits.max_new_tokens - len(answer.tokens)
        sampling = SamplingParams(
            max_new_tokens=budget,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            stop=limits.stop,
            seed=self._issued.seed if engine.scripted else None,
        )
        streamed = budget > self._quiet
        key, tape = ready.key if engine.exact else "", Tape(answer)
        true = True

        def on_tokens(chunk: Chunk) -> None:
            nonlocal true
            true &= self._extend(tape, chunk.token_ids, chunk.logprobs, chunk.weight_version, key)
            if self._progress.due:
                for progress in list(self._tools.under_way):
                    progress.keep_with_others()

        self._progress.left += budget
        try:
            generation = await engine.client.generate(
                np.concatenate([input_ids, answer.tokens]) if len(answer.tokens) else input_ids,
                sampling,
                extra_key=ready.key,
                on_tokens=on_tokens if streamed else None,
                stream_interval=min(16, settings.progress_limit),
            )
            if not streamed:
                for span in generation.weight_versions:
                    part = slice(span.start, span.end)
                    true &= self._extend(tape, generation.token_ids[part], generation.logprobs[part], span.version, key)
        finally:
            self._progress.left -= limits.max_new_tokens - len(answer.tokens)
        return generation.finish_reason if true else "abort"

    def _extend(self, tape: Tape, tokens: Int32Array, logprobs: Float32Array, label: str, key: str) -> bool:
        """Take sampled tokens over, unless they come from other weights than `key` names ("" for any)."""
        if key and label != key:
            # Other weights than those whose cache it was filed under: no version can vouch for these tokens.
            self._context.count("mislabelled_tokens", len(tokens))
            return False
        line, version = version_of(label)
        self._progress.lines.add(line)
        tape.extend(tokens, logprobs, version)
        self._delivery.advanced()
        self._delivery.tokens += len(tokens)
        self._progress.left -= len(tokens)
        self._context.count("tokens", len(tokens))
        return True

    async def keep(self) -> None:
        """Publish what the rollout function was told; returns when it is stored."""
        await self._progress.keep()

    def waiting(self, place: str) -> AbstractContextManager[None]:
        """The time of something that has a limit of its own, or waits for an engine."""
        return self._delivery.waiting(place)

    @property
    def _quiet(self) -> int:
        """Longer requests are streamed."""
        return min(_QUIET_TOKENS, self._settings.progress_limit)

    def _supervised(self, rows: list[PromptRow]) -> list[Segment]:
        """Each row becomes a segment: mask 1 on what a teacher wrote, version -1, log-prob 0."""
        segments = []
        for row in rows:
            tokens, mask = self._tools.tokenizer.encode_supervised(row, max_tokens=self._tools.model_context)
            zeros = np.zeros(len(tokens), np.float32)
            segments.append(Segment(tokens, mask, zeros, np.full(len(tokens), -1, np.int32)))
        return segments

    async def _say_result(
        self, rows: list[PromptRow], segments: list[Segment], completion: str, *, truncated: bool
    ) -> None:
        issued = self._issued
        message = TrajectoryGenerated(
            trajectory_id=issued.trajectory_id,
            attempt=issued.attempt,
            delivery=self._delivery.at.deliveries,
            prompt_id=issued.prompt_id,
            member=issued.member,
            group_size=issued.group_size,
            stage=issued.stage,
            rows=rows,
            segments=segments,
            completion=completion,
            versions=count_versions(segments),
            truncated=truncated,
            lines=sorted(self._progress.lines),
        )
        await self._progress.say_result(message)
        self._context.count("generated")
