"""One trajectory on a rollout worker: its rollout function, its samples, its progress and its result."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager

from actors.rollout.slot_gate import SlotGate
from actors.rollout.tools import Tools
from actors.runtime.delivery import PUBLISHING, Delivery
from actors.runtime.isolation import WorkFailed
from actors.runtime.worker import Produced
from asyncrl.bus.errors import BusError
from asyncrl.bus.group_rows import RowsUnreadable
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.publish import Fenced
from asyncrl.config.held_out import set_of
from asyncrl.data.tokenizer import TokenizerError
from asyncrl.engine.client import EngineRefused, SamplingParams
from asyncrl.engine.errors import VersionAbsent
from asyncrl.engine.fleet import Wanted
from asyncrl.engine.generator import Watch
from asyncrl.errors import EnvironmentFault, last_lines
from asyncrl.live.stored import TurnUnreadable
from asyncrl.rollout.context import RolloutContext, RolloutFunction
from asyncrl.rollout.host import Asked, Limits
from asyncrl.rollout.journal import Diverged
from asyncrl.tools.server import Toolbox
from asyncrl.tracing import SAMPLE, traced
from topics.actors import Waiting
from topics.ids import LIVE, letter_of
from topics.prompts import PromptIssued, PromptRow
from topics.trajectories import (
    Answer,
    Outcome,
    Segment,
    TrajectoryGenerated,
    count_versions,
    member_fields,
)
from topics.wire import Int32Array, UInt8Array, WireError

_ENVIRONMENTS = 3  # runs of a rollout function whose environment fails


class Execution(Watch):
    """One trajectory on this worker: the host of its rollout context, and the watch over its generations."""

    def __init__(
        self, tools: Tools, issued: PromptIssued, delivery: Delivery[PromptIssued], gate: SlotGate | None
    ) -> None:
        """
        Args:
            gate: gives the slots; None for work that takes none.
        """
        self._tools = tools
        self._gate = gate
        self._context = tools.context
        self._settings = tools.context.config.rollout
        self._issued = issued
        self._delivery = delivery
        evaluates = issued.stage == "eval"
        self._fleet = tools.eval_fleet if evaluates else tools.fleet
        self._generator = tools.eval_generator if evaluates else tools.generator
        exact = evaluates and bool(tools.context.config.eval.engines)
        self._wanted = Wanted(issued.min_version, exact=exact, group=issued.prompt_id)
        self._progress = self._tools.open_progress(self._issued, self._delivery)
        self._routing: list[UInt8Array] = []  # experts of the tokens of each segment

    async def run(self, *, look: bool) -> Produced:
        """Run the rollout function and return its outcome.

        Args:
            look: whether another worker may have worked on it before.

        Raises:
            WorkFailed: there is none.
        """
        progress = self._progress
        try:
            if look and await progress.load_existing():
                return []
            if self._delivery.at.num_delivered > 1:
                if self._issued.stage != "warmup" and not self._is_live:
                    await self._wait_for_engine()  # before that nothing of it runs, and its end would count for nothing
                if await self._tools.isolation.done_alone(self._delivery, progress.fruitless, self._progressed_at):
                    return None
                await progress.hold()  # from here on the fence refuses every earlier holder
            with traced(self._context.bus.run, self._issued.trajectory_id, SAMPLE, self._tools.traced_share):
                return [await self._attempt()]
        except asyncio.CancelledError:
            leaves = (self._context.stop.is_set() or self._delivery.returning) and self._delivery.verdict is None
            if leaves and (progress.unsaved or progress.is_in_vain):
                # It is given back: the next worker resumes from here and does not count this run as a death. The fence
                # may already hold the message that was being published when the request came; then there is nothing to
                # add.
                with contextlib.suppress(Fenced):
                    await progress.checkpoint()
            raise
        finally:
            progress.close()

    async def _attempt(self) -> TrajectoryGenerated:
        try:
            rows = await self._tools.rows.of(self._issued)
            if self._issued.stage == "warmup":
                result = self._result([], self._tools.supervised(rows), "")
            elif self._is_live:
                result = await self._of_turn(rows)
            else:
                self._tools.under_way.add(self._progress)
                result = await self._roll_out(rows)
        except Diverged as error:
            raise WorkFailed("diverged", str(error)) from error
        except (EngineRefused, VersionAbsent, RowsUnreadable, TokenizerError, TurnUnreadable) as error:
            raise WorkFailed("refused", str(error)) from error
        except SecretGone as error:
            raise WorkFailed("purged", str(error)) from error
        finally:
            self._tools.under_way.discard(self._progress)
        await self._progress.finish()
        if self._routing:  # the last write before its message: blobs that no message names are removed after a while
            with self.waiting(PUBLISHING):
                await self._tools.store_routing(result, self._routing)
        return result

    async def _progressed_at(self) -> int:
        """Return the progress so far, of any worker."""
        progress = self._tools.open_progress(self._issued, self._delivery)
        await progress.load_existing()
        return progress.progressed_at

    async def _wait_for_engine(self) -> None:
        """Wait until an engine could take a request."""
        with self.waiting(Waiting("version", version=self._issued.min_version)):
            try:
                self._fleet.release(await self._fleet.choose(self._wanted))
            except VersionAbsent as error:
                raise WorkFailed("refused", str(error)) from error

    async def sample(self, input_ids: Int32Array, answer: Answer, limits: Limits) -> None:
        """Extend an open answer until it is done: over weight updates, engine restarts, and from others' partials."""
        if self._delivery.tokens and len(input_ids) >= self._tools.served.context:
            answer.done, answer.finish = True, "length"  # a conversation has reached the end of the context
            return
        settings = self._settings
        sampling = SamplingParams(
            max_new_tokens=limits.max_new_tokens,
            temperature=self._issued.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            stop=limits.stop,
            stop_token_ids=self._tools.tokenizer.stop_ids,
            seed=limits.seed,
        )
        most = min(limits.max_new_tokens, self._tools.served.context - len(input_ids))
        self._progress.inflight += most - len(answer.tokens)
        try:
            await self._generator.generate(input_ids, sampling, wanted=self._wanted, answer=answer, watch=self)
        finally:
            self._progress.inflight -= most - len(answer.tokens)
            self._delivery.waits_for = Waiting()

    async def before(self, unreported: int) -> None:
        """Store progress that would exceed the bound: a short request reports no tokens while it runs."""
        if self._progress.unsaved + unreported > self._settings.progress_limit:
            await self.checkpoint()

    @property
    def toolbox(self) -> Toolbox:
        """The servers of tools of the worker."""
        return self._tools.toolbox

    def waiting(self, waits_for: Waiting) -> AbstractContextManager[None]:
        """Count a block as waiting: it has its own limit, or waits for an engine."""
        return self._delivery.waiting(waits_for)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Work in one of the slots of the worker, once one is free."""
        if self._gate is None:
            yield
            return
        self._gate.prepared(self)
        with self.waiting(Waiting("turn")):
            await self._gate.take()
        try:
            yield
        finally:
            self._gate.give()

    def requested(self, engine_id: str) -> None:
        self._delivery.waits_for = Waiting("engine", engine_id)
        self._delivery.advanced()

    def on_tokens(self, tokens: int, discarded: int, lineage: int) -> None:
        """New tokens came: progress may be due."""
        progress, delivery = self._progress, self._delivery
        delivery.discarded += discarded
        if tokens:
            progress.lineages.add(lineage)
            progress.inflight -= tokens
            delivery.tokens += tokens
            delivery.advanced()
            self._context.count("tokens", tokens)
        if progress.due:
            for other in list(self._tools.under_way):
                other.publish_with_others()

    def on_verified(self, tokens: int, passes: int) -> None:
        """A request ended whose tokens were drafted."""
        self._delivery.verified += tokens
        self._delivery.passes += passes

    async def _roll_out(self, rows: list[PromptRow]) -> TrajectoryGenerated:
        """Run the rollout function, again after a fault of its environment: recorded answers are not sampled again."""
        for further in reversed(range(_ENVIRONMENTS)):
            try:
                return await self._roll_out_once(rows)
            except EnvironmentFault as error:
                self._context.count("environment_faults")
                self._context.log.warning("environment failed", work=self._delivery.name, detail=str(error))
                if not further:
                    raise WorkFailed("environment", f"{_ENVIRONMENTS} times, the last one: {error}") from error
        raise AssertionError

    async def _roll_out_once(self, rows: list[PromptRow]) -> TrajectoryGenerated:
        issued, tools = self._issued, self._tools
        function = tools.functions.get(issued.task)
        if function is None:
            raise WireError(f"{issued.trajectory_id} is of task {issued.task!r}; here are {', '.join(tools.functions)}")
        held_out = set_of(tools.held_out, issued.task) if issued.stage == "eval" else None
        most = held_out.max_new_tokens if held_out is not None else self._settings.max_new_tokens
        limits = Limits(most, self._settings.stop)
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
            await self._call(function, rows[0], rollout)
            outcome, text = rollout.outcome_given(), rollout.sampled_text()
        except (Diverged, Fenced, EngineRefused, EnvironmentFault, VersionAbsent, TokenizerError, BusError):
            raise
        except (Exception, SystemExit) as error:  # any exception of a user's function is data, no fault of the worker
            raise WorkFailed("rollout", last_lines(error)) from error
        finally:
            self._progress.journal.end(token)
        segments, self._routing = rollout.segments(), rollout.routing()
        if not segments:
            raise WorkFailed("rollout", "the rollout function ended without a generate; there is nothing to train on")
        truncated, hybrid = rollout.truncated, rollout.hybrid
        return self._result(rows, segments, text, truncated=truncated, outcome=outcome, hybrid=hybrid)

    async def _call(self, function: RolloutFunction, row: PromptRow, rollout: RolloutContext) -> None:
        """Call a function in a slot, or one that prepares a place first, and then asks for a slot itself."""
        if self._issued.task not in self._tools.preparing:
            async with self.slot():
                await function(row, rollout)
            return
        gate = self._gate or SlotGate(1)
        gate.prepares(self)
        try:
            await function(row, rollout)
        finally:
            gate.prepared(self)

    @property
    def _is_live(self) -> bool:
        """Return whether it is a turn of live traffic, which is sampled already."""
        return letter_of(self._issued.prompt_id) == LIVE

    async def _of_turn(self, rows: list[PromptRow]) -> TrajectoryGenerated:
        """Return a stored turn as a trajectory, with the reward that it was admitted with."""
        named = rows[self._issued.member].metadata
        turn = await self._tools.turns.read(named["turn"])
        text = self._tools.tokenizer.decode(turn.finished.tokens)
        outcome = Outcome(reward=named["reward"])
        truncated = turn.finished.finish == "length"
        segment, self._routing = turn.segment(), [turn.experts] if turn.experts.any() else []
        if (hints := self._tools.hints) is not None:
            segment.hinted = await hints.prompts(turn, named["reward"])
            self._context.vitals["hints_unplaced"] = float(hints.unplaced)
        return self._result(rows, [segment], text, truncated=truncated, outcome=outcome)

    async def opponent(self, asked: Asked, limits: Limits) -> tuple[list[int], str, str]:
        """Sample from a second model."""
        return await self._tools.opponent.sample(asked, limits, self._issued.temperature)

    async def checkpoint(self) -> None:
        """Publish the answers that the rollout function got; returns when they are stored."""
        await self._progress.checkpoint()

    def _result(
        self,
        rows: list[PromptRow],
        segments: list[Segment],
        completion: str,
        *,
        truncated: bool = False,
        outcome: Outcome | None = None,
        hybrid: bool = False,
    ) -> TrajectoryGenerated:
        return TrajectoryGenerated(
            **member_fields(self._issued, self._delivery.at.num_delivered),
            rows=rows,
            segments=segments,
            completion=completion,
            versions=count_versions(segments),
            truncated=truncated,
            lineages=sorted(self._progress.lineages),
            discarded=self._delivery.discarded,
            verified=self._delivery.verified,
            passes=self._delivery.passes,
            spans=self._delivery.spans,
            outcome=outcome,
            hybrid=hybrid,
            secret=self._issued.secrets,
        )
