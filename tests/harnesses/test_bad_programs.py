"""Programs that are not installed, never call, call too late or wrongly, and sessions of many turns."""

import asyncio
import json
import string
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from asyncrl.config.harness_settings import CommandSettings, HarnessSettings, MiniSettings
from asyncrl.config.sandbox_settings import SandboxSettings
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.harnesses.kinds import harness_kind
from asyncrl.harnesses.rollout import harness_rollout
from asyncrl.rollout import endpoint as endpoints
from asyncrl.sandboxes.kinds import open_sandbox
from asyncrl.training.init_model import ModelShape, create_model
from harness.live_runs import TEMPLATE, WITH_TOOLS
from harness.lives import Life
from topics.prompts import PromptRow

SANDBOX = SandboxSettings(kind="none", trusted=True)
ROW = PromptRow("Count.", metadata={"files": {"note": "zero\n"}, "tests": {"any": ["true"]}})
TURNS = 40
PATHS = ("chat/completions", "responses", "messages")
IMAGES = (
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
)
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    folder = Path(tmp_path_factory.mktemp("model"))
    create_model(folder, alphabet=string.printable, seed=1, shape=ModelShape(context=8192), template=TEMPLATE)
    return TaskTokenizer.load(folder)


@pytest.fixture(scope="module")
def calling_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    folder = Path(tmp_path_factory.mktemp("calling"))
    create_model(folder, alphabet=string.printable, seed=1, shape=ModelShape(context=8192), template=WITH_TOOLS)
    return TaskTokenizer.load(folder)


def life_of(tokenizer: TaskTokenizer, reply: str, *, most: int = 64) -> Life:
    """Return a life whose policy always writes the same reply."""
    life = Life(tokenizer, most=most)
    life.host.written = lambda _ids: [*tokenizer.encode(reply).tolist(), tokenizer.eos_ids[0]]
    return life


async def work(life: Life, settings: HarnessSettings) -> None:
    harness = harness_kind(settings).make(settings, Path())
    await life.run(partial(harness_rollout(harness, settings, partial(open_sandbox, SANDBOX)), ROW))


async def test_a_session_of_40_turns_trains_no_more_tokens_than_its_final_history(tokenizer):
    life = life_of(tokenizer, "```sh\necho one >> note; wc -l note\n```")

    await work(life, MiniSettings(turns=TURNS))

    [segment] = life.context.segments()
    final = life.context._in_order()[-1]
    assert len(life.context._in_order()) == TURNS
    assert len(segment.tokens) == len(final.ids) + len(final.answer.tokens)
    assert int(segment.mask.sum()) == life.host.sampled


async def test_a_program_that_is_not_installed_is_a_failure_that_names_it(tokenizer):
    life = life_of(tokenizer, "x")

    await work(life, CommandSettings(command=["no-such-agent"]))

    failure = life.context.outcome_given().artefacts["failure"]
    assert failure == b"no-such-agent: exit code 127: no-such-agent: No such file or directory"


async def test_a_program_that_never_calls_leaves_nothing_to_train_on(tokenizer):
    life = life_of(tokenizer, "x")

    await work(life, CommandSettings(command=["true"]))

    assert not life.context.segments()


async def test_a_call_after_the_end_of_a_program_reaches_nothing(tokenizer):
    life, address = life_of(tokenizer, "x"), ""

    async def rollout(context) -> None:
        nonlocal address
        async with context.endpoint() as endpoint:
            address = endpoint.base_url

    await asyncio.wait_for(life.run(rollout), 60)

    async with aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.post(f"{address}/chat/completions", json={})


def body_of(path: str, content: object, **options: object) -> dict[str, object]:
    messages = [{"role": "user", "content": content}]
    given = {"input": messages} if path == "responses" else {"messages": messages, "max_tokens": 64}
    return {"model": "any", **given, **options}


async def ask(life: Life, work) -> None:
    """Let `work` ask at an endpoint: it takes a function that posts a body and returns status and text."""

    async def rollout(context) -> None:
        async with context.endpoint() as endpoint:
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            async with aiohttp.ClientSession(f"{endpoint.base_url}/", headers=headers) as client:

                async def post(path: str, body: dict[str, object]) -> tuple[int, str]:
                    async with client.post(path, json=body) as response:
                        return response.status, await response.text()

                await work(post, client)

    await asyncio.wait_for(life.run(rollout), 60)


async def test_an_image_is_refused_by_its_type_and_the_next_call_works(tokenizer):
    life, found = life_of(tokenizer, "x"), []

    async def work(post, _client) -> None:
        found.extend([await post(path, body_of(path, [image])) for path, image in zip(PATHS, IMAGES, strict=True)])
        found.append(await post(PATHS[0], body_of(PATHS[0], "Look.")))

    await ask(life, work)

    assert [status for status, _ in found] == [400, 400, 400, 200]
    for image, (_, text) in zip(IMAGES, found[:3], strict=True):
        assert image["type"] in text and "takes text" in text, text
    assert len(life.context.segments()) == 1


async def test_a_program_that_breaks_its_stream_and_asks_again_gets_the_same_answer_once(tokenizer, monkeypatch):
    monkeypatch.setattr(endpoints, "_KEEPALIVE_S", 0.01)
    life, body = Life(tokenizer), body_of(PATHS[0], "Look.", stream=True)
    life.host.stops_at = 2

    async def work(post, client) -> None:
        async with client.post(PATHS[0], json=body) as response:
            assert (await response.content.readline()).startswith(b": the answer is being sampled")
            response.close()
        life.host.stops_at = 1 << 30
        status, text = await post(PATHS[0], body)
        assert status == 200 and text.strip().endswith("data: [DONE]")

    await ask(life, work)

    [segment] = life.context.segments()
    assert int(segment.mask.sum()) == life.host.sampled


@pytest.mark.parametrize(
    "call", ['{"name": "find", "arguments": ', '{"arguments": {}}', "find()", '{"name": "find", "arguments": "x"}']
)
async def test_a_tool_call_that_cannot_be_read_is_text_of_the_reply(call, calling_tokenizer):
    reply = f"<tool_call>{call}</tool_call>"
    life = life_of(calling_tokenizer, reply, most=200)

    async def work(post, _client) -> None:
        status, text = await post(PATHS[0], body_of(PATHS[0], "Find it.", tools=[TOOL]))
        [choice] = json.loads(text)["choices"]
        assert (status, choice["finish_reason"], choice["message"]["content"]) == (200, "stop", reply)
        assert not choice["message"].get("tool_calls")

    await ask(life, work)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_fills_the_context_is_refused_in_the_words_that_programs_know(stream, tokenizer):
    life, found = Life(tokenizer, most=0), []

    async def work(post, _client) -> None:
        found.extend([await post(path, body_of(path, "Look.", stream=stream)) for path in PATHS])

    await ask(life, work)

    assert [status for status, _ in found] == [400, 400, 400]
    for (_, text), word in zip(found, ["context_length_exceeded"] * 2 + ["invalid_request_error"], strict=True):
        assert word in text and "prompt is too long" in text, text
