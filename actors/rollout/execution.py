"""One trajectory on a rollout worker: run its function, store its progress, publish its result."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractContextManager

import numpy as np

from actors.rollout.progress import Progress, ProgressLog, ProgressReader
from actors.runtime.actor import Context
from actors.runtime.delivery import Delivery
from actors.runtime.engines import open_fleet
from actors.runtime.isolation import Isolation, WorkFailed
from actors.runtime.worker import Produced
from asyncrl.bus.errors import BusError
from asyncrl.bus.group_rows import GroupRows, RowsUnreadable
from asyncrl.bus.publish import Fenced
from asyncrl.bus.vault import SecretGone
from asyncrl.config.held_out import graded_tasks, held_out_sets, set_of
from asyncrl.config.tasks import turns_of
from asyncrl.data.model_dir import model_info
from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.engine.client import EngineRefused, SamplingParams
from asyncrl.engine.errors import VersionAbsent
from asyncrl.engine.fleet import Wanted
from asyncrl.engine.generator import Generator, Manner, Watch
from asyncrl.errors import last_lines
from asyncrl.functions import load_rollout
from asyncrl.live.hints import HintReader, HintWriter
from asyncrl.live.stored import TurnReader, TurnUnreadable
from asyncrl.rollout.context import Limits, RolloutContext, RolloutFunction, single_turn
from asyncrl.rollout.journal import Diverged
from topics.actors import Waiting
from topics.ids import LIVE
from topics.prompts import PromptIssued, PromptRow
from topics.trajectories import (
    Answer,
    Outcome,
    Segment,
    TrajectoryGenerated,
    count_versions,
    member_fields,
)
from topics.wire import Int32Array, WireError


class Tools:
    """The dependencies that all trajectories of a worker share."""

    def __init__(self, context: Context, isolation: Isolation) -> None:
        """
        Raises:
            ModelError, TokenizerError, FunctionError: the model or the rollout function cannot serve.
        """
        config, directory = context.config, context.files.model_path(context.config.model)
        model = model_info(directory)
        self.context = context
        self.isolation = isolation
        self.model_context = model.context  # tokens that the trained model takes
        self.served = model._replace(context=config.engine.context or model.context)  # the model as engines serve it
        self.tokenizer = TaskTokenizer.load(directory)
        self.functions: dict[str, RolloutFunction] = {}  # by task
        for name, task in graded_tasks(config).items():
            own = task.rollout != "single_turn"
            self.functions[name] = load_rollout(task.rollout, base=context.files.base) if own else single_turn
        self.held_out = held_out_sets(config)
        self.fleet = open_fleet(context)
        # The loss with a worker is bounded, so tokens arrive in portions no larger than the bound.
        settings = config.rollout
        routed = config.learner.routing == "replay"
        manner = Manner(settings.progress_limit, config.weights.update == "in_place", settings.seeded, routed)
        decode, counts = self.tokenizer.decode_all, context.vitals
        self.generator = Generator(self.fleet, self.served, decode, counts=counts, manner=manner)
        self.eval_fleet, self.eval_generator = self.fleet, self.generator
        if config.eval.engines:  # what one version began no other goes on with
            self.eval_fleet, manner = open_fleet(context), manner._replace(in_place=False)
            self.eval_generator = Generator(self.eval_fleet, self.served, decode, counts=counts, manner=manner)
        self.rows = GroupRows(context.bus)
        self.turns = TurnReader(context.bus)
        self.hints = self._hint_reader(context)
        self.log = ProgressLog(context)
        self.reader = ProgressReader(context.bus, context.refuse)
        self.under_way: set[Progress] = set()

    def _hint_reader(self, context: Context) -> HintReader | None:
        live = context.config.live
        if not live.share or live.method == "binary":
            return None
        return HintReader(context.bus, HintWriter(self.tokenizer, live.hindsight.wording), context=self.model_context)


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
        self._progress = self._open_progress()

    async def run(self, *, look: bool) -> Produced:
        """Run the rollout function and return its outcome.

        Args:
            look: whether another worker may have worked on it before.

        Raises:
            WorkFailed: there is none.
        """
        progress = self._progress
        try:
            if look and await progress.look():
                return []
            if self._delivery.at.deliveries > 1:
                if self._issued.stage != "warmup" and not self._is_live:
                    await self._engine_there()  # before that nothing of it runs, and its end would count for nothing
                if await self._tools.isolation.done_alone(self._delivery, progress.fruitless, self._came_to):
                    return None
                await progress.hold()  # from here on the fence refuses every earlier holder
            return [await self._attempt()]
        except asyncio.CancelledError:
            leaves = self._context.stop.is_set() and self._delivery.verdict is None
            if leaves and (progress.unsaved or progress.is_in_vain):
                # Asked to leave: the next worker resumes from here and does not count this run as a death. The fence
                # may already hold the message that was being published when the request came; then there is nothing to
                # add.
                with contextlib.suppress(Fenced):
                    await progress.keep()
            raise
        finally:
            progress.close()

    async def _attempt(self) -> TrajectoryGenerated:
        try:
            rows = await self._tools.rows.of(self._issued)
            if self._issued.stage == "warmup":
                result = self._result([], self._supervised(rows), "")
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
        return result

    def _open_progress(self) -> Progress:
        return Progress(self._context, self._issued, self._delivery, self._tools.log, self._tools.reader)

    async def _came_to(self) -> int:
        """Return the progress so far, of any worker."""
        progress = self._open_progress()
        await progress.look()
        return progress.came_to

    async def _engine_there(self) -> None:
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
            seed=limits.seed,
        )
        most = min(limits.max_new_tokens, self._tools.served.context - len(input_ids))
        self._progress.left += most - len(answer.tokens)
        try:
            await self._generator.generate(
                input_ids,
                sampling,
                wanted=self._wanted,
                answer=answer,
                watch=self,
            )
        finally:
            self._progress.left -= most - len(answer.tokens)
            self._delivery.waits_for = Waiting()

    async def before(self, unreported: int) -> None:
        """Store progress that would exceed the bound: a short request reports nothing while it is under way."""
        if self._progress.unsaved + unreported > self._settings.progress_limit:
            await self.keep()

    def waiting(self, waits_for: Waiting) -> AbstractContextManager[None]:
        """The time of something that has a limit of its own, or waits for an engine."""
        return self._delivery.waiting(waits_for)

    def requested(self, engine_id: str) -> None:
        """A request is under way."""
        self._delivery.waits_for = Waiting("engine", engine_id)

    def on_tokens(self, tokens: int, discarded: int, lineage: int) -> None:
        """New tokens came: progress may be due."""
        progress = self._progress
        self._delivery.discarded += discarded
        if tokens:
            progress.lineages.add(lineage)
            progress.left -= tokens
            self._delivery.tokens += tokens
            self._delivery.advanced()
            self._context.count("tokens", tokens)
        if progress.due:
            for other in list(self._tools.under_way):
                other.publish_with_others()

    async def _roll_out(self, rows: list[PromptRow]) -> TrajectoryGenerated:
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
            outcome = rollout.outcome_given()
        except (Diverged, Fenced, EngineRefused, VersionAbsent, TokenizerError, BusError):
            raise
        except (Exception, SystemExit) as error:  # whatever a user's function raises is data, no fault of the worker
            raise WorkFailed("rollout", last_lines(error)) from error
        finally:
            self._progress.journal.end(token)
        segments = rollout.segments()
        if not segments:
            raise WorkFailed("rollout", "the rollout function ended without a generate; there is nothing to train on")
        return self._result(
            rows,
            segments,
            rollout.sampled_text(),
            truncated=rollout.truncated,
            outcome=outcome,
            hybrid=rollout.hybrid,
        )

    @property
    def _is_live(self) -> bool:
        """Return whether it is a turn of live traffic, which is sampled already."""
        return self._issued.prompt_id.startswith(LIVE)

    async def _of_turn(self, rows: list[PromptRow]) -> TrajectoryGenerated:
        """Return a stored turn as a trajectory, with the reward that it was admitted with."""
        named = rows[0].metadata
        turn = await self._tools.turns.read(named["turn"])
        text = self._tools.tokenizer.decode(turn.finished.tokens)
        outcome = Outcome(reward=named["reward"])
        truncated = turn.finished.finish == "length"
        segment = turn.segment()
        if (hints := self._tools.hints) is not None:
            segment.hinted = await hints.prompts(turn, named["reward"])
            self._context.vitals["hints_unplaced"] = float(hints.unplaced)
        return self._result(rows, [segment], text, truncated=truncated, outcome=outcome)

    async def keep(self) -> None:
        """Publish the answers that the rollout function got; returns when they are stored."""
        await self._progress.keep()

    def _supervised(self, rows: list[PromptRow]) -> list[Segment]:
        """Each row becomes a segment, or some: mask 1 on what is trained, version -1, log-prob 0."""
        turns = turns_of(self._context.config.warmup)
        segments = []
        for row in rows:
            encoded = self._tools.tokenizer.encode_supervised(row, turns, max_tokens=self._tools.model_context)
            for tokens, mask in encoded:
                zeros = np.zeros(len(tokens), np.float32)
                segments.append(Segment(tokens, mask, zeros, np.full(len(tokens), -1, np.int32)))
        return segments

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
            **member_fields(self._issued, self._delivery.at.deliveries),
            rows=rows,
            segments=segments,
            completion=completion,
            versions=count_versions(segments),
            truncated=truncated,
            lineages=sorted(self._progress.lineages),
            discarded=self._delivery.discarded,
            outcome=outcome,
            hybrid=hybrid,
            secret=self._issued.secrets,
        )
