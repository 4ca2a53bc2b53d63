"""A server that answers what its request and its model have no answer for: nothing of it is in a trajectory."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.batching import events_of
from asyncrl.engine.client import EngineClient, SamplingParams, message_of
from asyncrl.engine.errors import RequestFailed
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.generator import Generator
from asyncrl.engine.request_options import RequestOptions
from harness.sglang_like import Asked, LikeSGLang, like_sglang
from topics.engines import EngineReady


def never(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("portion", [2, 100], ids=["streamed", "whole"])
@pytest.mark.parametrize("wrong", [64, -1, 2**31, 2**70])
async def test_a_token_that_the_model_has_not_is_in_no_answer_and_in_no_further_request(wrong: int, portion: int):
    async with like_sglang() as one, sampled_from(one, portion) as generator:

        async def serve(asked: Asked) -> dict[str, Any]:
            first = len(one.asked) == 1
            return one.answer(asked, [7, wrong, 9, 9] if first else asked.tokens())

        one.serve = serve
        answer = await generator.generate(np.array([5], np.int32), SamplingParams(4))

    assert answer.tokens.tolist() == [9, 10, 11, 12]
    assert [asked.ids for asked in one.asked] == [[5], [5]]


def name_another(answer: dict[str, Any]) -> None:
    answer["meta_info"]["output_token_logprobs"][-1][1] += 1


def forget_log_prob(answer: dict[str, Any]) -> None:
    answer["meta_info"]["output_token_logprobs"].pop()


def forget_token(answer: dict[str, Any]) -> None:
    answer["output_ids"].pop()


def count_fewer(answer: dict[str, Any]) -> None:
    answer["meta_info"]["completion_tokens"] = -5


def end_without_any(answer: dict[str, Any]) -> None:
    answer["output_ids"].clear()
    answer["meta_info"]["output_token_logprobs"].clear()
    answer["meta_info"]["completion_tokens"] = 0


def give_a_probability(answer: dict[str, Any]) -> None:
    answer["meta_info"]["output_token_logprobs"][-1][0] = 0.7


def give_the_least_float(answer: dict[str, Any]) -> None:
    answer["meta_info"]["output_token_logprobs"][-1][0] = -1e30


@pytest.mark.parametrize(
    "spoil",
    [
        give_a_probability,
        give_the_least_float,
        name_another,
        forget_log_prob,
        forget_token,
        count_fewer,
        end_without_any,
    ],
)
@pytest.mark.parametrize("portion", [2, 100], ids=["streamed", "whole"])
async def test_tokens_without_log_probs_of_their_own_are_sampled_anew_behind_those_that_came_well(
    portion: int, spoil: Callable[[dict[str, Any]], None]
):
    async with like_sglang() as one, sampled_from(one, portion) as generator:

        async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
            tokens = asked.tokens()
            if len(one.asked) == 1 and asked.streamed:
                yield one.answer(asked, tokens[:2], None)
                tokens = tokens[2:]
            answer = one.answer(asked, tokens)
            if len(one.asked) == 1:
                spoil(answer)
            yield answer

        one.events = events
        one.serve = lambda asked: anext(events(asked))
        answer = await generator.generate(np.array([5], np.int32), SamplingParams(4))

    kept, anew = ([9, 10], [14, 15]) if portion == 2 else ([], [9, 10, 11, 12])
    assert (answer.tokens.tolist(), answer.finish) == ([*kept, *anew], "length")
    assert len(answer.logprobs) == len(answer.versions) == 4
    assert [asked.ids for asked in one.asked] == [[5], [5, *kept]]
    assert generator._counts["request_failed"] == 1


def test_an_answer_whose_bytes_are_no_text_is_a_fault_of_its_request():
    raw = b'{"message": "\xff"}'
    with pytest.raises(RequestFailed, match="unreadable answer"):
        EngineClient("http://127.0.0.1:1")._decode(raw, dict[str, str])
    assert message_of(raw) == '{"message": "\ufffd"}'


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"<html>\n  <h1>Not  found</h1>\n</html>\n", "<html> <h1>Not found</h1> </html>"),
        (b'{"error": {"message": "no such\\nmodel"}}', "no such model"),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b'{"detail": 7}', '{"detail": 7}'),
        (b"\xff", "\ufffd"),
        (b"x" * 9000, "x" * 500),
    ],
    ids=lambda part: str(part)[:20],
)
def test_the_words_of_an_error_answer_are_one_line(answer: bytes, words: str):
    assert message_of(answer) == words


async def test_experts_that_are_no_numbers_are_a_fault_of_that_request():
    async with like_sglang() as one, sampled_from(one, 100) as generator:

        async def serve(asked: Asked) -> dict[str, Any]:
            return one.answer(asked, asked.tokens(), **({"routed_experts": "AAAA"} if len(one.asked) == 1 else {}))

        one.serve = serve
        answer = await generator.generate(np.array([5], np.int32), SamplingParams(4))

    assert (answer.tokens.tolist(), len(one.asked)) == ([9, 10, 11, 12], 2)


@pytest.mark.parametrize("portion", [2, 100], ids=["streamed", "whole"])
async def test_tokens_beyond_those_that_were_asked_for_are_in_no_answer(portion: int):
    async with like_sglang() as one, sampled_from(one, portion) as generator:

        async def serve(asked: Asked) -> dict[str, Any]:
            return one.answer(asked, asked.tokens(200), "stop")

        one.serve = serve
        answer = await generator.generate(np.array([5], np.int32), SamplingParams(4))

    assert (answer.tokens.tolist(), answer.finish, len(one.asked)) == ([9, 10, 11, 12], "length", 1)


@asynccontextmanager
async def sampled_from(server: LikeSGLang, portion: int) -> AsyncIterator[Generator]:
    """A generator on one server, which streams what is longer than a portion."""
    server.weight_version = "0:0:made"
    fleet = Fleet(lambda _, address: EngineClient(address, generate_timeout_s=20), counts={}, fail=never)
    fleet.apply(EngineReady("engine-1", server.address, 0, 0, "made", 32))
    yield Generator(fleet, ModelInfo("any", 64, 128), str, counts={}, manner=RequestOptions(portion=portion))
    await fleet.close()


@pytest.mark.parametrize("size", range(1, 12))
async def test_the_events_of_a_stream_are_the_same_however_it_is_cut(size: int):
    text = b'data: {"a": 1}\n\ndata:{"b":"\\n"}\n\n\n\ndata: [DONE]\n\ndata: "after"\n\n'

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(text), size):
            yield text[start : start + size]

    async def rest() -> bytes:
        return b""

    content = SimpleNamespace(iter_any=pieces)
    response: Any = SimpleNamespace(content=content, read=rest)

    assert [event async for event in events_of(response, streamed=True)] == [b'{"a": 1}', b'{"b":"\\n"}']
