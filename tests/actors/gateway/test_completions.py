"""Prompts without a template, tokens of prompts, and sampling that open servers know: stock SDKs over HTTP."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncrl.bus.connection import Bus
from asyncrl.data.tokenizer import TaskTokenizer
from harness.gateways import gateway, turns_of
from harness.sdks import openai, sdks
from harness.sglang_like import Asked, LikeSGLang
from harness.stage import Stage

USER = [{"role": "user", "content": "abc"}]


async def post(address: str, key: str, path: str, **body: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession() as http, http.post(address + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_a_completion_continues_text_or_tokens_as_they_are(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (one, _),
    ):
        tokenizer = TaskTokenizer.load(tmp_path / "model")
        ids = tokenizer.encode("abc").tolist()
        ask: dict[str, Any] = {"model": "any", "extra_body": {"return_token_ids": True}}
        whole = await one.completions.create(prompt="abc", **ask)
        chunks = [chunk async for chunk in await one.completions.create(prompt=ids, stream=True, **ask)]
        several = await one.completions.create(prompt=ids, model="any", n=2, logprobs=1)
        with pytest.raises(openai.BadRequestError, match="has the token id 999999; the vocabulary has"):
            await one.completions.create(prompt=[999_999], model="any")
    assert [asked.ids for asked in inference.asked] == [ids] * 4
    assert whole.choices[0].prompt_token_ids == ids and whole.usage.prompt_tokens == len(ids)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text != ""
    assert (chunks[0].choices[0].prompt_token_ids, chunks[-1].choices[0].finish_reason) == (ids, "length")
    started, finished = await turns_of(bus)
    turn = whole.id.removeprefix("cmpl-")
    assert whole.choices[0].token_ids == finished[turn].tokens.tolist()
    assert (started[turn].api, started[turn].tokens.tolist(), started[turn].skip) == ("completions", ids, None)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert len(several.choices[0].logprobs.tokens) == len(several.choices[0].logprobs.token_logprobs) > 0


async def test_tokens_of_messages_are_those_of_the_prompt_that_a_request_has(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (one, _),
    ):
        said = (await one.chat.completions.create(model="any", messages=USER, max_tokens=9)).choices[0].message
        messages = [*USER, {"role": "assistant", "content": said.content}, *USER]
        _, tokens = await post(served.address, served.key, "/tokenize", messages=messages)
        _, text = await post(served.address, served.key, "/tokenize", prompt="abc", return_token_strs=True)
        await one.chat.completions.create(model="any", messages=messages)
    assert tokens["tokens"] == inference.asked[-1].ids and tokens["count"] == len(tokens["tokens"])
    assert "".join(text["token_strs"]) == "abc"


async def test_sampling_reaches_the_engine_and_what_changes_the_distribution_is_not_trained(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    fields: list[tuple[dict[str, Any], str | None]] = [
        ({"top_k": 5}, "truncated"),
        ({"min_p": 0.1}, "truncated"),
        ({"repetition_penalty": 1.1}, "penalised"),
        ({"logit_bias": {"7": -100.0}}, "penalised"),
        ({"stop_token_ids": [3]}, None),
    ]
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (one, _),
    ):
        for given, _ in fields:
            await one.chat.completions.create(model="any", messages=USER, extra_body=given)
    for asked, (given, _) in zip(inference.asked, fields, strict=True):
        assert {name: asked.sampling[name] for name in given} == given
    started, _ = await turns_of(bus)
    assert [one.skip for one in started.values()] == [skip for _, skip in fields]


async def test_a_token_that_ends_a_reply_is_no_text_of_it(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (one, _),
    ):
        tokenizer = TaskTokenizer.load(tmp_path / "model")
        reply, (stop,) = tokenizer.encode("def").tolist(), tokenizer.encode("b").tolist()

        async def serve(asked: Asked) -> dict[str, Any]:
            return inference.answer(asked, [*reply, stop], "stop")

        inference.serve = serve
        ask = await one.chat.completions.create(model="any", messages=USER, extra_body={"stop_token_ids": [stop]})
    assert (ask.choices[0].message.content, ask.choices[0].finish_reason) == ("def", "stop")
    _, finished = await turns_of(bus)
    assert [one.tokens.tolist() for one in finished.values()] == [[*reply, stop]]


async def test_a_request_without_reasoning_ends_its_prompt_with_a_closed_block(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with gateway(bus, stage, tmp_path / "model", inference, tools=True) as served:
        tokenizer = TaskTokenizer.load(tmp_path / "model")
        async with sdks(served.address, served.key) as (one, two):
            await one.chat.completions.create(model="any", messages=USER, reasoning_effort="none")
            await one.responses.create(model="any", input="abc", reasoning={"effort": "none"})
            await two.messages.create(model="any", max_tokens=9, messages=USER, thinking={"type": "disabled"})
            await one.chat.completions.create(model="any", messages=USER)
    ends = [tokenizer.decode_all(asked.ids).endswith("<think>\n\n</think>\n\n") for asked in inference.asked]
    assert ends == [True, True, True, False]
