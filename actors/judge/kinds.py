"""All kinds of judges, by the value of `live.judge.kind`: a new one is a class and a row of `JUDGES`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from actors.runtime.actor import Context
from actors.runtime.engines import follow_fleet, open_fleet
from asyncrl.child_pool.pool import ChildPool
from asyncrl.data.model_dir import check_model_directory
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.generator import Generator
from asyncrl.engine.request_options import RequestOptions
from asyncrl.judges.endpoint import EndpointJudge
from asyncrl.judges.engine import EngineJudge
from asyncrl.judges.protocol import Judge
from asyncrl.judges.rule import FunctionJudge, WordsJudge, judge_setup

Opened = Callable[[Context, TaskTokenizer, AsyncExitStack], Awaitable[Judge]]
"""Opens a judge of the run; the stack closes the resources of the judge."""


async def _rule(context: Context, _tokenizer: TaskTokenizer, _stack: AsyncExitStack) -> Judge:
    settings = context.config.live.judge
    if not settings.function:
        return WordsJudge()
    setup = judge_setup(settings.function, base=context.files.base, time_limit_s=settings.deadline_s)
    return FunctionJudge(settings.function, await ChildPool.open(setup, workers=settings.children))


async def _endpoint(context: Context, _tokenizer: TaskTokenizer, _stack: AsyncExitStack) -> Judge:
    settings = context.config.live.judge
    file = context.files.base / settings.api_key_file
    return EndpointJudge(
        settings.url,
        settings.model,
        key=file.read_text(encoding="utf-8").strip() if settings.api_key_file else "",
        deadline_s=settings.deadline_s,
        temperature=settings.temperature,
        most_tokens=settings.max_new_tokens,
    )


async def _engine(context: Context, tokenizer: TaskTokenizer, stack: AsyncExitStack) -> Judge:
    config = context.config
    settings, model = config.live.judge, check_model_directory(context.files.model_path(config.model))
    served = model._replace(context=config.engine.context or model.context)
    fleet = open_fleet(context)
    stack.push_async_callback(fleet.close)
    pinned = bool(settings.engines)
    stack.push_async_callback((await follow_fleet(context, fleet, "judges" if pinned else "training")).close)
    manner = RequestOptions(in_place=config.weights.update == "in_place" and not pinned)
    generator = Generator(fleet, served, tokenizer.decode_all, counts=context.vitals, manner=manner)
    return EngineJudge(
        generator,
        tokenizer,
        deadline_s=settings.deadline_s,
        temperature=settings.temperature,
        most_tokens=settings.max_new_tokens,
        version=config.start.step if pinned else None,
    )


JUDGES: dict[str, Opened] = {"rule": _rule, "endpoint": _endpoint, "engine": _engine}
