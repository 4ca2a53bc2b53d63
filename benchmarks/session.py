"""Sessions of programs at the endpoints of trajectories: CPU time of a call, and the cost of idle sessions."""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil

from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.token_buffer import TokenBuffer
from asyncrl.rollout.context import RolloutContext
from asyncrl.rollout.endpoint import Endpoint
from asyncrl.rollout.host import Asked, Limits
from asyncrl.rollout.journal import Journal
from asyncrl.tools.server import Toolbox
from asyncrl.training.init_model import ModelShape, create_model
from benchmarks.stage import BenchError
from topics.actors import Waiting
from topics.trajectories import Answer
from topics.wire import Int32Array

_ALPHABET = "abcdefghijklmnopqrstuvwxyz "
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
_TURN = 256  # tokens of a message of the history
_REPLY = "a b c d"
_WARM = 3  # calls that are not counted
Message = dict[str, Any]


async def bench_session(*, tokens: list[int], calls: int, idle: int, seconds: float) -> dict[str, float]:
    """CPU time of a call by the length of its history, and CPU time and memory of idle sessions.

    The time includes the client, which is in this process. The sampler answers each call at once.

    Args:
        tokens: lengths of histories.
        calls: that are measured at each length.
        idle: sessions that wait after one call each.
        seconds: length of the window in which they wait.

    Returns:
        Figures by name, units in the names.

    Raises:
        BenchError: a call was refused.
    """
    with tempfile.TemporaryDirectory() as folder:
        shape = ModelShape(context=2 * max(*tokens, 1024))
        create_model(Path(folder), alphabet=_ALPHABET, seed=1, shape=shape, template=_TEMPLATE)
        tokenizer = TaskTokenizer.load(Path(folder))
    figures = {f"call_of_{count}_tokens_cpu_ms": await _call_ms(tokenizer, count, calls) for count in tokens}
    return {**figures, **await _idle(tokenizer, idle, seconds)}


async def _call_ms(tokenizer: TaskTokenizer, tokens: int, calls: int) -> float:
    """Return the median of the CPU milliseconds of a call that continues a history of so many tokens."""
    messages: list[Message] = [{"role": "user", "content": "a"}]
    times: list[float] = []
    async with _session(tokenizer) as client:
        text = (_ALPHABET * _TURN)[:_TURN]
        for _ in range(1 + tokens // (_TURN + len(_REPLY))):
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": _REPLY}]
        for _ in range(_WARM + calls):
            messages.append({"role": "user", "content": text[:16]})
            began = time.process_time()
            messages.append(await _asked(client, messages, tokens))
            times.append(time.process_time() - began)
    return 1e3 * statistics.median(times[_WARM:])


async def _idle(tokenizer: TaskTokenizer, sessions: int, seconds: float) -> dict[str, float]:
    """Measure sessions that have answered one call each and wait."""
    process = psutil.Process()
    async with AsyncExitStack() as stack:
        gc.collect()
        before = process.memory_full_info().uss
        for _ in range(sessions):
            client = await stack.enter_async_context(_session(tokenizer))
            await _asked(client, [{"role": "user", "content": "a"}])
        gc.collect()
        memory = process.memory_full_info().uss - before
        began = time.process_time()
        await asyncio.sleep(seconds)
        cpu_s = time.process_time() - began
    return {
        "idle_sessions": float(sessions),
        "idle_cpu_percent_of_a_core": 100 * cpu_s / seconds,
        "memory_of_an_idle_session_kb": memory / 1e3 / sessions,
    }


class _Host:
    """Gives each call the same answer at once."""

    def __init__(self, tokenizer: TaskTokenizer) -> None:
        self.toolbox = Toolbox({}, Path())
        self._reply = np.append(tokenizer.encode(_REPLY), np.int32(tokenizer.eos_ids[0]))

    async def sample(self, input_ids: Int32Array, answer: Answer, limits: Limits) -> None:
        TokenBuffer(answer).extend(self._reply, np.full(len(self._reply), -1.0, np.float32), 0)
        answer.done, answer.finish = True, "stop"

    async def checkpoint(self) -> None:
        """Publish nothing."""

    async def opponent(self, asked: Asked, limits: Limits) -> tuple[list[int], str, str]:
        raise BenchError("no session of this benchmark has an opponent")

    def waiting(self, waits_for: Waiting) -> AbstractContextManager[None]:
        return nullcontext()

    def slot(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()


@asynccontextmanager
async def _session(tokenizer: TaskTokenizer) -> AsyncIterator[aiohttp.ClientSession]:
    """Serve a trajectory; gives a client of its endpoint."""
    journal, limits = Journal(), Limits(64, [])
    context = RolloutContext(tokenizer, journal, _Host(tokenizer), seed=1, limits=limits, tool_limit_s=60.0)
    token = journal.begin()
    try:
        endpoint = context.endpoint()
    finally:
        journal.end(token)
    async with endpoint, _client(endpoint) as client:
        yield client


def _client(endpoint: Endpoint) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(f"{endpoint.base_url}/", headers={"Authorization": f"Bearer {endpoint.api_key}"})


async def _asked(client: aiohttp.ClientSession, messages: list[Message], least: int = 1) -> Message:
    """Return the reply to a conversation of so many tokens."""
    async with client.post("chat/completions", json={"model": "policy", "messages": messages}) as response:
        given = await response.json()
    if response.status != 200:
        raise BenchError(f"the endpoint refused a call: {given}")
    if given["usage"]["prompt_tokens"] < least:
        raise BenchError(f"the prompt has {given['usage']['prompt_tokens']} tokens, expected at least {least}")
    return {"role": "assistant", "content": given["choices"][0]["message"]["content"]}
