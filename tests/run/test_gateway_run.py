"""A whole run whose policy is talked to while it trains: nobody notices updates, nor the death of an engine."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from asyncrl.bus.connection import Bus
from harness.gateways import turns_of
from harness.live_runs import answers, new_key, with_gateway
from harness.runs import PACED, address_of, command, topics_left_in, two_steps_more, up
from harness.sdks import anthropic, openai, sdks
from harness.stage import until
from topics.turns import TurnFinished, TurnStarted

pytestmark = pytest.mark.slow

MOST = 24  # tokens of a reply
VERSIONS = 3  # that the replies have at least


class Talker:
    """A client that holds conversations of three turns over all three APIs, one after the other."""

    def __init__(self, address: str, key: str) -> None:
        self.replies: list[str] = []
        self._address, self._key = address, key
        self._stop = False

    async def talk(self) -> None:
        async with sdks(self._address, self._key) as (first, second):
            while not self._stop:
                messages: list[dict[str, str]] = []
                for number in range(3):
                    messages.append({"role": "user", "content": "abc"})
                    text = await self._reply(first, second, messages, (len(self.replies) + number) % 3)
                    messages.append({"role": "assistant", "content": text})
                    self.replies.append(text)

    async def _reply(self, first, second, messages: list[dict[str, str]], api: int) -> str:
        if api == 0:
            stream = await first.chat.completions.create(model="any", messages=messages, max_tokens=MOST, stream=True)
            return "".join([event.choices[0].delta.content or "" async for event in stream if event.choices])
        if api == 1:
            stream = await first.responses.create(model="any", input=messages, max_output_tokens=MOST, stream=True)
            *_, last = [event async for event in stream]  # the SDK's own accumulators know no end by length
            assert last.type in ("response.completed", "response.incomplete"), last
            return last.response.output_text
        async with second.messages.stream(model="any", messages=messages, max_tokens=MOST) as stream:
            final = await stream.get_final_message()
            return "".join(block.text for block in final.content)

    def stop(self) -> None:
        self._stop = True


async def test_people_talk_to_the_policy_over_updates_and_deaths(tmp_path: Path):
    settings, address = with_gateway(tmp_path)
    async with up(tmp_path, *settings, "engine.count=2", PACED, "learner.steps=100000") as run:
        key = await new_key(tmp_path, address)
        talkers = [Talker(address, key) for _ in range(2)]
        talking = [asyncio.create_task(talker.talk()) for talker in talkers]
        await run.reaches(lambda: len(run.steps()) >= 2, "the first steps")
        await run.kill("engine-1")
        await two_steps_more(run, "steps after the death of an engine")
        bus = await Bus.connect(address_of(run), "short")

        async def have_many() -> bool:
            return len(versions_of((await turns_of(bus))[1])) >= VERSIONS

        await until(have_many, "replies have tokens of as many versions", 180)
        await bus.close()
        for talker in talkers:
            talker.stop()
        await asyncio.gather(*talking)  # raises what any request raised: none is tried again
        replies = sum(len(talker.replies) for talker in talkers)

        async with sdks(address, key) as (first, second):
            counted = await second.messages.count_tokens(model="any", messages=[{"role": "user", "content": "abcd"}])
            models = [model.id async for model in first.models.list()]
            with pytest.raises(openai.BadRequestError, match="send fewer messages"):
                await first.responses.create(model="any", input="a" * 600)
        async with sdks(address, "sk-wrong") as (first, second):
            with pytest.raises(openai.AuthenticationError, match="not valid here"):
                await first.responses.create(model="any", input="abc")
            with pytest.raises(anthropic.AuthenticationError, match="not valid here"):
                await second.models.list()
        assert (counted.input_tokens, models) == (4, ["short"])

        await run.kill("gateway-1")
        await until(lambda: answers(address), "a new gateway listens")
        async with sdks(address, key) as (first, _):
            again = await first.responses.create(model="any", input="abc", max_output_tokens=3)
            assert again.usage.output_tokens <= 3
        _, listed = await command(tmp_path, "keys", "list")
        code, _ = await command(tmp_path, "keys", "revoke", "--key", listed.split()[0])
        assert (code, "anna" in listed, key in listed) == (0, True, False)

        async def is_refused() -> bool:
            async with sdks(address, key) as (first, _):
                try:
                    await first.models.list()
                except openai.AuthenticationError:
                    return True
            return False

        await until(is_refused, "the key is revoked")
        code, _ = await command(tmp_path, "down")
        assert (code, await run.ended()) == (0, 0), run.story
    code, output = await command(tmp_path, "audit")
    assert code == 0, output
    async with topics_left_in(run.root) as bus:
        check_turns(*await turns_of(bus), replies=replies)


def versions_of(finished: dict[str, TurnFinished]) -> set[int]:
    return {int(version) for turn in finished.values() for version in turn.versions}


def check_turns(started: dict[str, TurnStarted], finished: dict[str, TurnFinished], replies: int) -> None:
    """Check that each reply is stored with log-probs and versions, and that prompts begin with what was sampled."""
    assert started.keys() == finished.keys()
    assert len(finished) == replies + 1  # that of the second gateway
    assert {turn.finish for turn in finished.values()} <= {"stop", "length"}
    assert len(versions_of(finished)) >= VERSIONS
    histories: dict[str, list[int]] = {}
    for name, turn in started.items():
        reply = finished[name]
        assert len(reply.tokens) == len(reply.logprobs) == len(reply.versions) <= MOST
        assert np.isfinite(reply.logprobs).all() and (reply.logprobs <= 0).all()
        before = histories[turn.parent] if turn.parent else []
        assert turn.known == len(before)
        histories[name] = [*before, *turn.tokens.tolist(), *reply.tokens.tolist()]
    assert sum(bool(turn.parent) for turn in started.values()) >= replies // 2  # second and third turns
    assert all(turn.rewritten == 0 for turn in started.values())
