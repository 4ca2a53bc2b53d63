"""The stock SDKs of OpenAI and Anthropic read what the three APIs render."""

import pytest

from asyncrl.live.apis.schema import Ending, LiveError
from harness.live_apis import served
from harness.sdks import sdks

anthropic, openai = pytest.importorskip("anthropic"), pytest.importorskip("openai")

PIECES = ["Hel", "lo ", "Wörld"]
ENDING = Ending("Hello Wörld", 3, "stop")
USER = [{"role": "user", "content": "Hi"}]


async def test_whole_replies():
    async with served(PIECES, ENDING) as address, sdks(address) as (first, second):
        chat = await first.chat.completions.create(model="tiny", messages=USER)
        response = await first.responses.create(model="tiny", input="Hi")
        message = await second.messages.create(model="tiny", messages=USER, max_tokens=9)

    assert chat.choices[0].message.content == response.output_text == message.content[0].text == "Hello Wörld"
    assert chat.usage and response.usage
    assert chat.usage.completion_tokens == response.usage.output_tokens == message.usage.output_tokens == 3
    assert (chat.choices[0].finish_reason, response.status, message.stop_reason) == ("stop", "completed", "end_turn")


async def test_streams_and_their_accumulated_ends():
    async with served(PIECES, ENDING) as address, sdks(address) as (first, second):
        async with first.chat.completions.stream(model="tiny", messages=USER) as chunks:
            chat = [event.delta async for event in chunks if event.type == "content.delta" and event.delta]
            completion = await chunks.get_final_completion()
        async with first.responses.stream(model="tiny", input="Hi") as events:
            response = [event.delta async for event in events if event.type == "response.output_text.delta"]
            responded = await events.get_final_response()
        async with second.messages.stream(model="tiny", messages=USER, max_tokens=9) as stream:
            message = [text async for text in stream.text_stream]
            final = await stream.get_final_message()

    assert chat == response == message == PIECES
    assert completion.choices[0].message.content == responded.output_text == final.content[0].text == "Hello Wörld"
    assert (final.usage.input_tokens, final.usage.output_tokens) == (7, 3)


async def test_refusals_and_failures_within_a_stream_are_raised_as_errors_of_the_sdk():
    lost = LiveError("internal", "the engine is lost")
    async with served(PIECES, ENDING, fails=lost) as address, sdks(address) as (first, second):
        with pytest.raises(openai.BadRequestError, match="n is 17") as refused:
            await first.chat.completions.create(model="tiny", messages=USER, n=17)
        with pytest.raises(openai.BadRequestError, match=r"tools\[0\].type is"):
            await first.responses.create(model="tiny", input="Hi", tools=[{"type": "file_search"}])
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format is"):
            form = {"output_config": {"format": {"type": "json_schema", "schema": 5}}}
            await second.messages.create(model="tiny", messages=USER, max_tokens=9, extra_body=form)
        with pytest.raises(openai.APIError, match="the engine is lost"):
            [_ async for _ in await first.chat.completions.create(model="tiny", messages=USER, stream=True)]
        with pytest.raises(anthropic.APIStatusError, match="the engine is lost"):
            [_ async for _ in await second.messages.create(model="tiny", messages=USER, max_tokens=9, stream=True)]
        ends = [event async for event in await first.responses.create(model="tiny", input="Hi", stream=True)]

    assert refused.value.param == "n"
    assert ends[-1].type == "response.failed" and ends[-1].response.error.message == "the engine is lost"
