"""The rollout worker: runs rollout functions on engines, publishes progress and results, resumes others' work."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import AbstractContextManager
from typing import Any

from actors.rollout.ended import EVERY, EndedCache
from actors.rollout.slots import SlotSearch
from actors.rollout.tools import Tools
from actors.runtime.actor import Context
from actors.runtime.delivery import PUBLISHING, Delivery
from actors.runtime.engines import follow_fleet
from actors.runtime.isolation import WorkFailed
from actors.runtime.worker import Produced, WorkerLoop
from asyncrl.algorithms.lag import USUAL_SIGMA
from asyncrl.bus.errors import BusError
from asyncrl.bus.group_rows import RowsUnreadable
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.log import Record, last_sequence
from asyncrl.bus.publish import Fenced
from asyncrl.config.held_out import set_of
from asyncrl.config.slots import LEAST, first_slots, most_slots, requests_at_once, rollout_workers
from asyncrl.data.tokenizer import TokenizerError
from asyncrl.engine.client import EngineRefused, SamplingParams
from asyncrl.engine.errors import VersionAbsent
from asyncrl.engine.fleet import Wanted
from asyncrl.engine.generator import Watch
from asyncrl.errors import EnvironmentFault, last_lines
from asyncrl.live.stored import TurnUnreadable
from asyncrl.rollout.context import RolloutContext
from asyncrl.rollout.host import Asked, Limits
from asyncrl.rollout.journal import Diverged, branch_tasks
from asyncrl.tools.server import Toolbox
from asyncrl.tracing import SAMPLE, traced
from topics.actors import Waiting
from topics.groups import GROUP_DROPPED, GroupDropped
from topics.ids import LIVE, letter_of, prompt_of
from topics.prompts import PromptIssued, PromptRow
from topics.topic import BATCHES, PROMPTS, Topic
from topics.trajectories import (
    TRAJECTORY_DROPPED,
    Answer,
    Outcome,
    Segment,
    TrajectoryDropped,
    TrajectoryGenerated,
    count_versions,
    member_fields,
)
from topics.wire import Int32Array, UInt8Array, WireError

_ADAPT_S = 1.0  # between two decisions about the slots
_ENVIRONMENTS = 3  # runs of a rollout function whose environment fails


class Execution(Watch):
    """One trajectory on this worker: the host of its rollout context, and the watch over its generations."""

    def __init__(self, tools: Tools, issued: PromptIssued, delivery: Delivery[PromptIssued]) -> None:
        self._tools = tools
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
            await function(rows[0], rollout)
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


async def main(context: Context) -> None:
    """Run a rollout worker until asked to stop."""
    await RolloutWorker(context).run()


class RolloutWorker:
    """Runs many trajectories at once, one task each."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.loop = WorkerLoop(context, self.handle, first_slots(context.config), counts_runs=True)
        self.tools = Tools(context, self.loop.isolation)
        self._requests = requests_at_once(context.config)
        least = min(first_slots(context.config), -(-LEAST // rollout_workers(context.config)))
        self._search = SlotSearch(least, self._most_slots)
        self._ends = EndedCache()
        self._old_work = 0  # sequence of the newest prompt issued before this worker listened
        self._working: dict[str, tuple[int, Delivery[PromptIssued]]] = {}  # attempt and lease, by trajectory
        self._ends_listener = context.listen(BATCHES, self._on_end, [TRAJECTORY_DROPPED, GROUP_DROPPED])

    async def run(self) -> None:
        """Work until asked to stop."""
        branch_tasks(asyncio.get_running_loop())
        opponents = contextlib.AsyncExitStack()
        await self.tools.opponent.open(opponents)
        engines = [await follow_fleet(self.context, self.tools.fleet)]
        if self.tools.eval_fleet is not self.tools.fleet:
            engines.append(await follow_fleet(self.context, self.tools.eval_fleet, "evaluations"))
        # The ends that are on the log by now are of work that was issued before: it is looked up when it comes.
        await self._ends_listener.start(after=await last_sequence(self.context.bus, BATCHES))
        self._old_work = await last_sequence(self.context.bus, PROMPTS)
        if self.context.config.rollout.slots == "auto":
            self.context.tasks.start(self._adapt_slots())
        await self.loop.run()
        await self._ends_listener.close()
        for listener in engines:
            await listener.close()
        await self.tools.close()
        await opponents.aclose()
        await self.tools.fleet.close()
        await self.tools.eval_fleet.close()

    async def _adapt_slots(self) -> None:
        """Hold as many trajectories as end in time and speed the engines up."""
        while True:
            await asyncio.sleep(_ADAPT_S)
            sampled = int(self.context.vitals.get("tokens", 0))
            slots = self._search.decide(time.monotonic(), sampled, self.loop.held)
            self.loop.resize(slots)
            self.context.vitals["slots"] = slots

    def _most_slots(self, sigma: float | None) -> int:
        self._requests = max(self._requests, self.tools.fleet.slots)  # an engine that loads a version comes back
        return most_slots(self.context.config, self._requests, sigma=USUAL_SIGMA if sigma is None else sigma)

    async def handle(self, issued: PromptIssued, delivery: Delivery[PromptIssued]) -> Produced:
        """Finish one trajectory, unless another worker did, or it ended while it waited in the queue."""
        self.tools.rows.learn(issued)
        look = self._may_exist(delivery, issued)
        self._working[issued.trajectory_id] = (issued.attempt, delivery)
        try:
            looks_up = look or self._ends.may_be_incomplete(delivery.record.time_ns)
            if self._ends.include(issued) or (looks_up and await self._ends.look_up(self.context.bus, issued)):
                self.context.count("ended_unworked")
                return []
            produced = await Execution(self.tools, issued, delivery).run(look=look)
            if issued.stage == "rl":
                self._search.ended(delivery.tokens)
            return produced
        finally:
            if self._working.get(issued.trajectory_id, (0, None))[1] is delivery:
                del self._working[issued.trajectory_id]

    def _may_exist(self, delivery: Delivery[PromptIssued], issued: PromptIssued) -> bool:
        """Return whether another worker may have worked on it before.

        A first delivery of a message issued while this worker was subscribed, on a connection that never broke, is new.
        Should that be wrong after all, the fence refuses the result.
        """
        fresh = delivery.at.num_delivered == 1 and issued.attempt == 0 and self.context.bus.reconnects == 0
        return not fresh or delivery.at.stream_sequence <= self._old_work

    def _on_end(self, _topic: Topic[Any], message: GroupDropped | TrajectoryDropped, record: Record) -> None:
        """Stop work on what the buffer has ended."""
        self._ends.add(message, record.time_ns)
        if isinstance(message, GroupDropped):
            ended = [name for name in self._working if prompt_of(name) == message.prompt_id]
        else:
            attempt, _ = self._working.get(message.trajectory_id, (EVERY, None))
            ended = [message.trajectory_id] if attempt <= message.attempt else []
        for name in ended:
            self.context.count("stopped")
            self._working.pop(name)[1].end(done=True)
