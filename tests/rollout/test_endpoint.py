"""Programs that know nothing of rollouts sample at an endpoint; a resumed trajectory gives them the same answers."""

import asyncio
from pathlib import Path

import pytest

from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.errors import AsyncRLError
from asyncrl.training.init_model import create_model
from harness.live_runs import TEMPLATE
from harness.lives import MOST, Life
from harness.sdks import anthropic, openai
from harness.stage import until


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    folder = Path(tmp_path_factory.mktemp("model"))
    create_model(folder, alphabet="abcdefghijklmnopqrstuvwxyz0123456789+=^", seed=1, template=TEMPLATE)
    return TaskTokenizer.load(folder)


def client_of(endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


async def ask(client, *texts: str, **options) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    reply = await client.chat.completions.create(model="any", messages=messages, **options)
    return reply.choices[0].message.content


async def talk(context) -> list[str]:
    """Three turns."""
    texts = ["abc="]
    async with context.endpoint() as endpoint, client_of(endpoint) as client:
        for turn in range(3):
            texts += [await ask(client, *texts), f"{turn}+"]
    return texts[1::2]


async def test_turns_of_a_program_are_one_row_whose_prompts_begin_with_the_sampled_tokens(tokenizer):
    life = Life(tokenizer)

    replies = await life.run(talk)

    [segment] = life.context.segments()
    assert int(segment.mask.sum()) == 3 * MOST
    sampled = tokenizer.decode(segment.tokens[segment.mask == 1])
    assert sampled == "".join(replies) == life.context.sampled_text()
    assert segment.logprobs[segment.mask == 1].tolist() == [-1.0] * 3 * MOST


async def test_a_resumed_program_gets_the_recorded_answers_and_goes_on_with_equal_tokens(tokenizer):
    expected = Life(tokenizer)
    replies = await expected.run(talk)
    killed = Life(tokenizer)
    killed.host.stops_at = 2 * MOST + 2  # in the third turn
    task = asyncio.ensure_future(killed.run(talk))
    await until(lambda: killed.host.sampled == killed.host.stops_at, "it is in the third turn")
    await killed.host.checkpoint()
    task.cancel()
    await asyncio.wait({task})

    resumed = Life(tokenizer, killed.host.kept)
    assert await resumed.run(talk) == replies

    assert resumed.host.sampled == MOST - 2
    [mine], [theirs] = resumed.context.segments(), expected.context.segments()
    assert mine.tokens.tolist() == theirs.tokens.tolist()
    assert mine.mask.tolist() == theirs.mask.tolist()


async def test_calls_in_another_order_get_their_own_recorded_answers(tokenizer):
    def asks(order: list[str]):
        async def function(context) -> dict[str, list[str]]:
            found: dict[str, list[str]] = {}
            async with context.endpoint() as endpoint, client_of(endpoint) as client:
                for text in order:
                    found.setdefault(text, []).append(await ask(client, text))
            return found

        return function

    first = Life(tokenizer)
    found = await first.run(asks(["a", "b", "a"]))
    await first.host.checkpoint()
    again = Life(tokenizer, first.host.kept)

    assert await again.run(asks(["b", "a", "a"])) == found
    assert again.host.sampled == 0
    assert len(set(found["a"])) == 2  # equal calls draw different answers
    rows = [[segment.tokens.tolist() for segment in life.context.segments()] for life in (first, again)]
    assert rows[0] == rows[1]


async def test_a_client_that_leaves_and_asks_again_gets_the_rest_of_the_same_answer(tokenizer):
    life = Life(tokenizer)
    life.host.stops_at = 2

    async def impatient(context) -> str:
        async with context.endpoint() as endpoint, client_of(endpoint) as client:
            with pytest.raises(openai.APITimeoutError):
                await ask(client, "abc=", timeout=0.3)
            life.host.stops_at = 1 << 30
            return await ask(client, "abc=")

    await life.run(impatient)

    assert life.host.sampled == MOST
    assert [int(segment.mask.sum()) for segment in life.context.segments()] == [MOST]


async def test_a_stream_and_other_apis_have_the_text_of_a_whole_reply(tokenizer):
    async def three(context) -> list[str]:
        async with context.endpoint() as endpoint, client_of(endpoint) as client:
            messages = [{"role": "user", "content": "abc="}]
            stream = await client.chat.completions.create(model="any", messages=messages, stream=True)
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            address = endpoint.base_url.removesuffix("/v1")
            async with anthropic.AsyncAnthropic(base_url=address, api_key=endpoint.api_key, max_retries=0) as other:
                message = await other.messages.create(model="any", max_tokens=MOST, messages=messages)
            return [streamed, message.content[0].text]

    life = Life(tokenizer)
    texts = await life.run(three)

    assert [len(text) for text in texts] == [MOST, MOST]
    assert life.context.sampled_text() == "".join(texts)


async def test_what_a_trajectory_cannot_record_is_refused(tokenizer):
    async def wrong(context) -> None:
        async with context.endpoint() as endpoint, client_of(endpoint) as client:
            with pytest.raises(openai.BadRequestError, match="n is not supported"):
                await ask(client, "a", n=2)
            with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
                await ask(client, "a", frequency_penalty=1.0)
            client.api_key = "other"
            with pytest.raises(openai.AuthenticationError, match="not that of this endpoint"):
                await ask(client, "a")

    life = Life(tokenizer)
    await life.run(wrong)

    assert life.context.segments() == []


async def test_a_fault_of_the_engines_ends_the_trajectory_as_one_of_generate_does(tokenizer):
    class Refused(AsyncRLError):
        pass

    life = Life(tokenizer)
    life.host.fault = Refused("no engine takes it")

    with pytest.raises(Refused, match="no engine takes it"):
        await life.run(talk)
