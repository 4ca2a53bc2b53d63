"""The evaluator: answers held-out prompts with a version and says how well."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from actors.actor import ActorFault, Context
from actors.engines import EnginePool, version_of
from actors.worker import Delivery, WorkerLoop
from asyncrl.bus.provision import QUEUES
from asyncrl.bus.talk import say
from asyncrl.engine.client import EngineRefused, EngineUnavailable, SamplingParams
from asyncrl.tasks.data import DataError, open_source
from asyncrl.tasks.functions import FunctionError
from asyncrl.tasks.rewards import GradeRequest, GraderError, RewardFailed, open_grader
from asyncrl.tasks.tokens import TaskTokenizer, TokenizerError
from topics.evals import EVAL_SCORED, EvalRequested, EvalScored
from topics.prompts import PromptRow

_HELD_OUT = 1_000_003  # added to the seed: made rows of another seed are other rows
_SHOWN = 5


async def main(context: Context) -> None:
    """Play an evaluator until asked to stop."""
    cast = context.cast
    try:
        source = open_source(
            cast.eval.source or cast.task.source,
            options=cast.task.options,
            seed=cast.seed + _HELD_OUT,
            base=context.files.base,
        )
        tokenizer = TaskTokenizer.load(context.files.model_path(cast))
        grader = await open_grader(cast.reward.function, base=context.files.base, time_limit_s=cast.reward.time_limit_s)
    except (DataError, TokenizerError, GraderError, FunctionError) as error:
        raise ActorFault(str(error)) from error
    pool = EnginePool(context)
    await pool.start()

    async def answer(row: PromptRow, request: EvalRequested) -> dict[str, Any]:
        """One prompt: sample, grade."""
        ids = tokenizer.encode_prompt(row, max_tokens=None)
        sampling = SamplingParams(
            max_new_tokens=cast.rollout.max_new_tokens, temperature=request.temperature, stop=cast.rollout.stop
        )
        while True:
            engine = await pool.choose(request.version)
            assert engine.ready is not None
            try:
                generation = await engine.client.generate(ids, sampling, extra_key=engine.ready.key)
            except EngineUnavailable:
                pool.suspect(engine)
                continue
            if generation.finish_reason != "abort":
                break  # cut short by a new version: asked again, so that one version answers the whole prompt
        completion = tokenizer.decode(generation.token_ids)
        found = {"prompt": row.prompt, "completion": completion, "label": row.label, "reward": 0.0, "graded": True}
        found["version"] = version_of(generation.weight_version)[1]
        found["tokens"] = len(generation.token_ids)
        try:
            result = await grader.grade(GradeRequest(completion, row.prompt, row.label, row.metadata))
            found["reward"] = result.reward
        except RewardFailed:
            found["graded"] = False
        return found

    async def evaluate(request: EvalRequested, delivery: Delivery[EvalRequested]) -> bool:
        """All prompts of one evaluation."""
        began = time.monotonic()
        delivery.parked = True  # it waits for engines; each answer has the engine's own deadline
        count = min(request.prompts, source.rows_per_epoch or request.prompts)
        try:
            answers = await asyncio.gather(*(answer(source.row(number), request) for number in range(count)))
        except (EngineRefused, TokenizerError) as error:
            raise ActorFault(f"evaluation {request.eval_id}: {error}") from error
        versions: dict[int, int] = {}
        for found in answers:
            versions[found["version"]] = versions.get(found["version"], 0) + found.pop("tokens")
        message = EvalScored(
            eval_id=request.eval_id,
            version=request.version,
            versions=versions,
            accuracy=sum(found["reward"] for found in answers) / max(1, count),
            prompts=count,
            failed=sum(not found["graded"] for found in answers),
            seconds=round(time.monotonic() - began, 3),
            samples=answers[:_SHOWN],
        )
        await say(context.bus, EVAL_SCORED, message, id=request.eval_id)
        return True

    await WorkerLoop(context, QUEUES["evaluator"], EvalRequested, evaluate, 1).run()
    await pool.close()
    await grader.close()
