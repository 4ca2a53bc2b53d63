"""Log-probs of the sampled tokens, as the stock SDK of OpenAI reads them, streamed and whole."""

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.live.apis import openai
from harness.gateways import gateway, stored_turns
from harness.sdks import sdks
from harness.sglang_like import LikeSGLang
from harness.stage import Stage
from topics.turns import TurnFinished

USER = [{"role": "user", "content": "abc"}]


async def test_each_sampled_token_comes_with_the_log_prob_that_is_stored(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    ask = {"model": "any", "messages": USER, "max_tokens": 6, "logprobs": True}
    wanted = {"model": "any", "input": USER, "max_output_tokens": 6, "include": ["message.output_text.logprobs"]}
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (client, _),
    ):
        whole = (await client.chat.completions.create(**ask)).choices[0]
        chunks = [chunk.choices[0] async for chunk in await client.chat.completions.create(**ask, stream=True)]
        response = await client.responses.create(**wanted)
        *_, last = [event async for event in await client.responses.create(**wanted, stream=True)]
        unasked = await client.chat.completions.create(model="any", messages=USER, max_tokens=6)
    streamed = [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content]
    said = [[one.token for one in known] for known in (whole.logprobs.content, streamed)]
    said += [[one.token for one in found.output[0].content[0].logprobs] for found in (response, last.response)]
    texts = [
        whole.message.content,
        "".join(chunk.delta.content or "" for chunk in chunks),
        response.output_text,
        last.response.output_text,
    ]
    assert [len(tokens) for tokens in said] == [6] * 4 and ["".join(tokens) for tokens in said] == texts
    stored = next(turn for turn in await stored_turns(bus) if isinstance(turn, TurnFinished))
    assert [one.logprob for one in whole.logprobs.content] == stored.logprobs.tolist()
    assert all(math.isfinite(one.logprob) and one.top_logprobs == [] for one in streamed)
    assert unasked.choices[0].logprobs is None


async def test_they_are_written_beside_the_loop_on_which_streams_wait(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    threads, write = set[threading.Thread](), openai._one

    def noted(*given: Any) -> dict[str, Any]:
        threads.add(threading.current_thread())
        return write(*given)

    monkeypatch.setattr(openai, "_one", noted)
    ask = {"model": "any", "messages": USER, "max_tokens": 6, "logprobs": True, "top_logprobs": 20, "n": 2}
    wanted = {"model": "any", "input": USER, "max_output_tokens": 6, "include": ["message.output_text.logprobs"]}
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (client, _),
    ):
        for streamed in (True, False):
            for create, asked in ((client.chat.completions.create, ask), (client.responses.create, wanted)):
                reply = await create(**asked, stream=streamed)
                assert not streamed or [event async for event in reply]
    assert threads and threading.main_thread() not in threads
