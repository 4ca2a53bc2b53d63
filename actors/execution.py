"""One trajectory on a rollout worker: run its function, keep its progress, say its result."""

from __future__ import annotations

import asyncio
import contextlib
from typing import NamedTuple

import numpy as np

from actors.actor import Context
from actors.engines import Engine, EnginePool, version_of
from actors.suspects import Suspects
from actors.together import Together
from actors.worker import Delivery
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import Record, read_last, read_message
from asyncrl.bus.talk import BlobMissing, Fenced, attempt_of, read, say, say_fenced
from asyncrl.crash import crash_point
from asyncrl.engine.client import Chunk, EngineRefused, EngineUnavailable, SamplingParams
from asyncrl.tasks.functions import last_lines
from asyncrl.tasks.journal import Diverged, Journal, Tape
from asyncrl.tasks.rollout import Limits, RolloutContext, RolloutFunction
from asyncrl.tasks.tokens import TaskTokenizer, TokenizerError
from topics.prompts import PromptIssued
from topics.table import topic_of
from topics.topic import TRAJECTORIES
from topics.trajectories import (
    TRAJECTORY_FAILED,
    TRAJECTORY_GENERATED,
    TRAJECTORY_PROGRESSED,
    Answer,
    FailureReason,
    Segment,
    TrajectoryFailed,
    TrajectoryGenerated,
    TrajectoryProgressed,
    count_versions,
)
from topics.wire import Float32Array, Int32Array, WireError

_QUIET_TOKENS = 64  # longer generations are streamed, so that one sees them advance


class RolloutFailed(Exception):
    """The user's rollout function raised."""


class Tools(NamedTuple):
    """What every trajectory of a worker shares."""

    context: Context
    pool: EnginePool
    tokenizer: TaskTokenizer
    function: RolloutFunction
    together: Together
    suspects: Suspects


class Execution:
    """One trajectory on this worker: the host of its rollout context."""

    def __init__(self, tools: Tools, issued: PromptIssued, delivery: Delivery[PromptIssued]) -> None:
        self._tools = tools
        self._context = tools.context
        self._settings = tools.context.cast.rollout
        self._issued = issued
        self._name = issued.trajectory_id
        self._delivery = delivery
        self._journal = Journal()
        self._lines: set[int] = set()
        self._newest = 0  # sequence of the newest message inside this trajectory's fence
        self._chain = (0, 0)  # sequences of the first and the newest published progress
        self._kept_tokens = 0  # sampled tokens in the newest published progress
        self._progressed = 1  # delivery in which it last came further
        self._keeping = asyncio.Lock()
        self._background: asyncio.Task[None] | None = None
        self._over = False

    async def run(self, *, look: bool) -> bool:
        """Run the rollout function and publish what came of it; True when the work is done and said.

        Args:
            look: whether somebody may have worked on it before.
        """
        try:
            if look and await self._look():
                return True
            turn = self._tools.suspects.turn(self._delivery, self._name, self._issued.attempt, self._progressed)
            async with turn as poison:
                if poison:
                    await self._context.bury(self._delivery.record, f"poison: {poison}")
                    await self._say_failure("poison", poison)
                elif self._issued.stage == "warmup":
                    await self._say_result(self._supervised(), "", truncated=False)
                else:
                    with self._tools.together.member(self):
                        await self._roll_out()
        except Fenced:
            self._context.count("fenced")
            return await self._is_generated()
        except Diverged as error:
            await self._say_failure("diverged", str(error))
        except (EngineRefused, TokenizerError) as error:
            await self._say_failure("refused", str(error))
        except RolloutFailed as error:
            await self._say_failure("rollout", str(error))
        except asyncio.CancelledError:
            if self._delivery.verdict is None and self._unkept:
                # Asked to leave: whoever comes next goes on from here. The fence may already hold what was being
                # published when this came; then there is nothing to add.
                with contextlib.suppress(Fenced):
                    await self.keep()
            raise
        finally:
            self._over = True
        return True

    async def sample(self, input_ids: Int32Array, answer: Answer, limits: Limits) -> None:
        """Extend an open answer until it is done: over weight updates, engine restarts, and from others' partials."""
        while True:
            budget = limits.max_new_tokens - len(answer.tokens)
            if budget <= 0:
                answer.done, answer.finish = True, "length"
                return
            self._delivery.parked += 1
            self._delivery.place = f"an engine with version {self._issued.min_version}"
            try:
                engine = await self._tools.pool.choose(self._issued.min_version)
            finally:
                self._delivery.parked -= 1
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

    async def keep(self) -> None:
        """Publish the journal as it is now; returns when it is stored."""
        async with self._keeping:
            crash_point("progress.before")
            news = self._journal.news()
            message = TrajectoryProgressed(
                trajectory_id=self._name,
                attempt=self._issued.attempt,
                delivery=self._delivery.at.deliveries,
                offset=self._journal.tokens,
                journal=news,
                previous=self._chain[1],
                first=self._chain[0],
                lines=sorted(self._lines),
            )
            self._newest = await say_fenced(
                self._context.bus,
                TRAJECTORY_PROGRESSED,
                message,
                key=self._name,
                id=self._id,
                expected=self._newest,
            )
            crash_point("progress.stored")
            self._journal.told(news)
            self._chain = (self._chain[0] or self._newest, self._newest)
            self._kept_tokens = message.offset
            self._context.count("progressed")
        self._delivery.advanced()

    @property
    def _id(self) -> str:
        return f"{self._name}:{self._issued.attempt}:{self._delivery.at.deliveries}"

    async def _look(self) -> bool:
        """Read what was said of this trajectory before: True when nothing is left to do; else resume from it."""
        bus = self._context.bus
        newest = await read_last(bus, TRAJECTORIES, f"asyncrl.{bus.run}.trajectory.*.{self._name}")
        if newest is None:
            return False
        if (attempt := attempt_of(newest)) is None:
            self._pass_over(newest, "its header attempt is no number")
        elif attempt != self._issued.attempt:
            self._newest = newest.sequence
            return attempt > self._issued.attempt  # this attempt has ended, another was issued
        elif topic_of(newest.subject) is TRAJECTORY_GENERATED:
            return True
        else:
            await self._resume(newest)
        return False

    async def _resume(self, newest: Record) -> None:
        """Go on from the newest progress, or from the start where it cannot be read."""
        try:
            progress = await self._read_progress(newest)
        except (WireError, BlobMissing) as error:
            self._pass_over(newest, str(error))
            return
        self._newest, self._progressed = newest.sequence, progress.delivery
        self._kept_tokens = self._delivery.tokens = progress.offset
        self._lines.update(progress.lines)
        self._context.count("resumed_elsewhere")

    def _pass_over(self, newest: Record, reason: str) -> None:
        """What stands last inside the fence cannot be read: it is buried, and the work goes on behind it."""
        self._context.bury_soon(newest, reason)
        self._newest = newest.sequence

    async def _read_progress(self, newest: Record) -> TrajectoryProgressed:
        """Take over all that was told, from the newest message back to the first; returns the newest.

        Raises:
            WireError, BlobMissing: a part of it is damaged or gone.
        """
        chain, record = [], newest
        while True:
            chain.append(await read(self._context.bus, TrajectoryProgressed, record))
            if not (previous := chain[-1].previous):
                break
            found = await read_message(self._context.bus, TRAJECTORIES, previous)
            if found is None or previous >= record.sequence:
                raise WireError(f"message {previous}, which message {record.sequence} continues, is not there")
            record = found
        self._journal = Journal(progress.journal for progress in reversed(chain))
        self._chain = (record.sequence, newest.sequence)
        return chain[0]

    async def _is_generated(self) -> bool:
        bus = self._context.bus
        newest = await read_last(bus, TRAJECTORIES, f"asyncrl.{bus.run}.trajectory.*.{self._name}")
        return (
            newest is not None
            and topic_of(newest.subject) is TRAJECTORY_GENERATED
            and attempt_of(newest) == self._issued.attempt
        )

    async def _roll_out(self) -> None:
        issued, tools = self._issued, self._tools
        limits = Limits(self._settings.max_new_tokens, self._settings.stop)
        rollout = RolloutContext(tools.tokenizer, self._journal, self, seed=issued.seed, limits=limits)
        token = self._journal.begin()
        try:
            await tools.function(issued.rows[0], rollout)
        except (Diverged, Fenced, EngineRefused, TokenizerError, BusError):
            raise
        except Exception as error:  # a user's function may raise anything; that is data, not a fault of the worker
            raise RolloutFailed(last_lines(error)) from error
        finally:
            self._journal.end(token)
        segments = rollout.segments()
        if not segments:
            raise RolloutFailed("the rollout function ended without a generate; there is nothing to train on")
        await self._say_result(segments, rollout.sampled_text(), truncated=rollout.truncated)

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
        streamed = budget > min(_QUIET_TOKENS, settings.progress_tokens)
        key, tape = ready.key if engine.exact else "", Tape(answer)
        true = True

        def on_tokens(chunk: Chunk) -> None:
            nonlocal true
            true &= self._extend(tape, chunk.token_ids, chunk.logprobs, chunk.weight_version, key)
            if len(answer.tokens) < limits.max_new_tokens:  # else it has ended: what comes of it is said at once
                self._keep_when_due()

        generation = await engine.client.generate(
            np.concatenate([input_ids, answer.tokens]) if len(answer.tokens) else input_ids,
            sampling,
            extra_key=ready.key,
            on_tokens=on_tokens if streamed else None,
            stream_interval=min(16, settings.progress_tokens),
        )
        if not streamed:
            for span in generation.weight_versions:
                part = slice(span.start, span.end)
                true &= self._extend(tape, generation.token_ids[part], generation.logprobs[part], span.version, key)
        return generation.finish_reason if true else "abort"

    def _extend(self, tape: Tape, tokens: Int32Array, logprobs: Float32Array, label: str, key: str) -> bool:
        """Take sampled tokens over, unless they come from other weights than `key` names ("" for any)."""
        if key and label != key:
            # Other weights than those whose cache it was filed under: no version can vouch for these tokens.
            self._context.count("mislabelled_tokens", len(tokens))
            return False
        line, version = version_of(label)
        self._lines.add(line)
        tape.extend(tokens, logprobs, version)
        self._delivery.advanced()
        self._delivery.tokens += len(tokens)
        self._context.count("tokens", len(tokens))
        return True

    def _keep_when_due(self) -> None:
        """Publish progress, with that of others, before more than `progress_tokens` can be lost."""
        limit = self._settings.progress_tokens
        if self._unkept >= limit - limit // 32 and not self._is_keeping:  # tokens go on coming until it is stored
            self._tools.together.keep()

    def keep_with_others(self) -> None:
        """Publish progress if it would be due before long; a lost fence ends the work here."""
        # Three quarters: earlier would make more messages, later fewer of them would leave together.
        if 4 * self._unkept > 3 * self._settings.progress_tokens and not (self._over or self._is_keeping):
            self._background = asyncio.create_task(self.keep())
            self._background.add_done_callback(self._kept)

    @property
    def _unkept(self) -> int:
        return self._delivery.tokens - self._kept_tokens

    @property
    def _is_keeping(self) -> bool:
        return self._background is not None and not self._background.done()

    def _kept(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, Fenced):
            self._context.count("fenced")
        else:
            self._context.fail(error)
        self._delivery.end(done=False)

    def _supervised(self) -> list[Segment]:
        """Each row becomes a segment: mask 1 on what a teacher wrote, version -1, log-prob 0."""
        segments = []
        for row in self._issued.rows:
            tokens, mask = self._tools.tokenizer.encode_supervised(row)
            zeros = np.zeros(len(tokens), np.float32)
            segments.append(Segment(tokens, mask, zeros, np.full(len(tokens), -1, np.int32)))
        return segments

    async def _say_result(self, segments: list[Segment], completion: str, *, truncated: bool) -> None:
        issued, self._over = self._issued, True  # no progress comes in between
        if self._background is not None:
            await asyncio.wait({self._background})
        message = TrajectoryGenerated(
            trajectory_id=self._name,
            attempt=issued.attempt,
            delivery=self._delivery.at.deliveries,
            prompt_id=issued.prompt_id,
            member=issued.member,
            group_size=issued.group_size,
            stage=issued.stage,
            rows=issued.rows if issued.stage == "rl" else [],
            segments=segments,
            completion=completion,
            versions=count_versions(segments),
            truncated=truncated,
            lines=sorted(self._lines),
        )
        await say_fenced(
            self._context.bus,
            TRAJECTORY_GENERATED,
            message,
            key=self._name,
            id=self._id,
            expected=self._newest,
        )
        self._context.count("generated")

    async def _say_failure(self, reason: FailureReason, detail: str) -> None:
        issued = self._issued
        message = TrajectoryFailed(
            trajectory_id=self._name,
            attempt=issued.attempt,
            delivery=self._delivery.at.deliveries,
            prompt_id=issued.prompt_id,
            member=issued.member,
            group_size=issued.group_size,
            stage=issued.stage,
            reason=reason,
            detail=detail,
        )
        self._context.count("failed")
        self._context.log.warning("trajectory failed", trajectory=self._name, reason=reason, detail=detail)
        await say(self._context.bus, TRAJECTORY_FAILED, message, key=self._name, id=f"{self._id}:{reason}")
