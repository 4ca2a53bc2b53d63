"""The evaluator: answer held-out prompts with a version and publish the score."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from actors.runtime.actor import ActorFault, Context
from actors.runtime.engines import follow_engines, open_fleet
from actors.runtime.poison_guard import PoisonGuard
from actors.runtime.rows import as_faults, open_rows
from actors.runtime.worker import Delivery, Produced, WorkerLoop
from asyncrl.crash import crash_point
from asyncrl.data.model_dir import ModelError, check_model_directory
from asyncrl.data.row_maker import RowMaker
from asyncrl.data.sources import label_reader
from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.engine.client import EngineRefused, SamplingParams
from asyncrl.engine.generator import Generator
from asyncrl.rewards.functions import FunctionError
from asyncrl.rewards.graders import Grader, GradeRequest, GraderError, RewardFailed, open_grader
from topics.actors import Waiting
from topics.evals import EvalRequested, EvalScored
from topics.trajectories import Answer

_HELD_OUT = 1_000_003  # added to the seed: made rows of another seed are other rows
_SHOWN = 5


async def main(context: Context) -> None:
    """Run an evaluator until asked to stop."""
    reward = context.config.reward
    try:
        grader = await open_grader(
            reward.function, base=context.files.base, time_limit_s=reward.time_limit_s, memory_mb=reward.memory_mb
        )
    except (GraderError, FunctionError) as error:
        raise ActorFault(str(error)) from error
    config = context.config
    try:
        labels_for = label_reader(config.reward.function, warmup_steps=0)
        source, seed = config.eval.source or config.task.source, config.seed + _HELD_OUT
        async with open_rows(context, source, seed, labels_for) as rows:
            await Evaluator(context, grader, rows).run()
    finally:
        await grader.close()


class Evaluator:
    """Takes one evaluation at a time, all its prompts at once."""

    def __init__(self, context: Context, grader: Grader, rows: RowMaker) -> None:
        config = context.config
        self._context = context
        self._grader = grader
        self._sampling = config.rollout
        self._rows = rows
        self._fleet = open_fleet(context)
        self._suspects = PoisonGuard(context)
        try:
            self._tokenizer = TaskTokenizer.load(context.files.model_path(config))
            model = check_model_directory(context.files.model_path(config))
        except (TokenizerError, ModelError) as error:
            raise ActorFault(str(error)) from error
        served = model._replace(context=config.engine.context or model.context)
        self._generator = Generator(self._fleet, served, self._tokenizer.decode_all, counts=context.vitals)

    async def run(self) -> None:
        """Work until asked to stop."""
        engines = await follow_engines(self._context, self._fleet)
        await WorkerLoop(self._context, self.handle, 1).run()
        await self._suspects.close()
        await engines.close()
        await self._fleet.close()

    async def handle(self, request: EvalRequested, delivery: Delivery[EvalRequested]) -> Produced:
        """All prompts of one evaluation."""
        if self._suspects.doubts(delivery.at.deliveries - 1):
            return [] if await self._suspects.alone(delivery) else None
        began = time.monotonic()
        count = min(request.prompts, self._rows.opened.rows_per_epoch or request.prompts)
        self._rows.want(range(count))
        answering = (self._answer(number, request) for number in range(count))
        with delivery.waiting(Waiting("evaluation")):  # each row, request and reward has a limit of its own
            answers = await asyncio.gather(*answering)
        crash_point("eval.answered")
        versions: Counter[int] = Counter()
        for found in answers:
            versions.update(found.pop("versions"))
        scored = EvalScored(
            eval_id=request.eval_id,
            version=request.version,
            versions=dict(versions),
            accuracy=sum(found["reward"] for found in answers) / max(1, count),
            prompts=count,
            failed=sum(bool(found["failed"]) for found in answers),
            seconds=round(time.monotonic() - began, 3),
            samples=answers[:_SHOWN],
        )
        return [scored]

    async def _answer(self, number: int, request: EvalRequested) -> dict[str, Any]:
        """One prompt: sample and grade. What cannot be answered or graded counts as reward 0, with the reason."""
        with as_faults():
            row = await self._rows.row(number)
        answer = Answer("generate", "")
        completion, reward, failed = "", 0.0, ""
        sampling = SamplingParams(self._sampling.max_new_tokens, request.temperature, stop=self._sampling.stop)
        try:
            ids = self._tokenizer.encode_prompt(row, max_tokens=None)
            await self._generator.generate(ids, sampling, version=request.version, answer=answer)
            completion = self._tokenizer.decode(answer.tokens)
            result = await self._grader.grade(GradeRequest(completion, row.prompt, row.label, row.metadata))
            reward = result.reward
        except (EngineRefused, TokenizerError, RewardFailed) as error:
            failed = str(error)
        return {
            "prompt": row.prompt,
            "completion": completion,
            "label": row.label,
            "reward": reward,
            "failed": failed,
            "versions": Counter(answer.versions.tolist()),  # a new one continues what its update interrupted
        }
