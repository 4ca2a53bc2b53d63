"""Several replies to a request, and the likeliest tokens: the stock SDK, a real engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.bus.connection import Bus
from harness.gateways import Embedded, gateway, stored_turns
from harness.sdks import sdks
from harness.stage import Stage
from topics.turns import TurnFinished, TurnStarted

USER = [{"role": "user", "content": "abc"}]
ASK: dict[str, Any] = {"model": "any", "messages": USER, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
TOP = ["message.output_text.logprobs"]
TOLD: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
WANTED: dict[str, Any] = {"model": "any", "input": "abc", "max_output_tokens": 4, "top_logprobs": 3}


async def test_choices_are_turns_of_one_prompt_and_any_of_them_is_continued(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    async with (
        gateway(bus, stage, tmp_path / "model", Embedded()) as served,
        sdks(served.address, served.key) as (client, _),
    ):
        raw = await client.chat.completions.with_raw_response.create(**ASK, n=3)
        whole, turns = raw.parse(), raw.headers["x-asyncrl-turn"].split(",")
        chunks = [chunk async for chunk in await client.chat.completions.create(**ASK, **TOLD, n=2)]
        said = whole.choices[1].message.model_dump(exclude_none=True)
        await client.chat.completions.create(**ASK | {"messages": [*USER, said, *USER]})
        responses = [await client.responses.create(**WANTED, include=TOP)]
        *_, last = [event async for event in await client.responses.create(**WANTED, include=TOP, stream=True)]
        responses.append(last.response)
        facts = await stored_turns(bus)
    assert [choice.index for choice in whole.choices] == [0, 1, 2] and len(set(turns)) == 3
    streamed = [chunk.choices[0] for chunk in chunks[:-1]]
    assert {choice.index for choice in streamed} == {0, 1}
    begun = [fact for fact in facts if isinstance(fact, TurnStarted)]
    ended = {fact.turn_id: fact for fact in facts if isinstance(fact, TurnFinished)}
    sampled = [len(ended[fact.turn_id].tokens) for fact in begun[:5]]
    assert (whole.usage.completion_tokens, chunks[-1].usage.completion_tokens) == (sum(sampled[:3]), sum(sampled[3:]))
    ends = [ended[fact.turn_id].finish == "stop" for fact in begun[:5]]  # by a token of no text
    assert {fact.turn_id for fact in begun[:3]} == set(turns) and len({fact.session for fact in begun[:3]}) == 1
    assert len({fact.tokens.tobytes() for fact in begun[:5]}) == 1 and len({fact.digest for fact in begun[:3]}) == 3
    assert len({fact.siblings for fact in begun[:3]}) == len({fact.siblings for fact in begun[3:5]}) == 1
    assert len({fact.siblings for fact in begun}) == len({fact.session for fact in begun}) + 1 and begun[0].siblings
    assert begun[5].parent == turns[1]  # no two of them say the same
    for choice, turn in zip(whole.choices, turns, strict=True):
        shown = len(ended[turn].tokens) - (choice.finish_reason == "stop")
        assert [one.logprob for one in choice.logprobs.content] == ended[turn].logprobs.tolist()[:shown]
    places = [one for choice in [*whole.choices, *streamed] if choice.logprobs for one in choice.logprobs.content]
    assert len(places) == sum(sampled) - sum(ends) and all(len(one.top_logprobs) == 2 for one in places)
    assert all(one.top_logprobs[0].logprob >= max(one.top_logprobs[1].logprob, one.logprob - 1e-4) for one in places)
    tops = [one.top_logprobs for response in responses for one in response.output[0].content[0].logprobs]
    assert {*map(len, tops)} == {3}


async def test_a_seed_gives_the_same_replies_again_and_each_choice_its_own(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    ask: dict[str, Any] = {"model": "any", "messages": USER, "max_tokens": 24, "n": 3}
    async with (
        gateway(bus, stage, tmp_path / "model", Embedded()) as served,
        sdks(served.address, served.key) as (client, _),
    ):
        said = [
            [choice.message.content for choice in (await client.chat.completions.create(**ask, **more)).choices]
            for more in ({"seed": 7}, {"seed": 7}, {"seed": -(2**63)}, {"seed": 2**63 - 1}, {})
        ]
    assert said[0] == said[1]
    assert len({text for texts in said[1:] for text in texts}) == 12
