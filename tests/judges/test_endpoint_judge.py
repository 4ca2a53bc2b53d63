"""A judge behind a real HTTP server: slow, silent, wrong, or failing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from asyncrl.judges.endpoint import EndpointJudge
from asyncrl.judges.protocol import Case, Vote, VoteFailed
from harness.endpoints import Answer, Endpoint, completion

CASE = Case("t1", "How far is it?", "Two miles.", "In kilometres, please.")


@contextlib.asynccontextmanager
async def judging(endpoint: Endpoint, **options: Any) -> AsyncIterator[EndpointJudge]:
    async with endpoint.served() as address:
        options = {"deadline_s": 30.0, "temperature": 0.6, "most_tokens": 99} | options
        judge = EndpointJudge(address, "wise", **options)
        try:
            yield judge
        finally:
            await judge.close()


async def test_a_vote_is_asked_for_as_the_api_has_it():
    endpoint = Endpoint(lambda _http, mark: completion(f"Hm.\nHINT {mark}: Use kilometres.\nVOTE {mark}: -1"))
    async with judging(endpoint, key="sk-1") as judge:
        assert await judge.vote(CASE) == Vote(-1, "Use kilometres.")

    (body,), (headers,) = endpoint.bodies, endpoint.headers
    assert headers["Authorization"] == "Bearer sk-1"
    assert {name: body[name] for name in ("model", "temperature", "max_tokens")} == {
        "model": "wise",
        "temperature": 0.6,
        "max_tokens": 99,
    }
    assert [message["role"] for message in body["messages"]] == ["system", "user"]


async def cut(http: web.Request, _mark: str) -> web.Response:
    http.transport.abort()
    return web.Response()


TRANSIENT = {
    "500": lambda _http, _mark: web.Response(status=500, text="oops"),
    "429": lambda _http, _mark: web.Response(status=429),
    "cut": cut,
}


@pytest.mark.parametrize("fault", TRANSIENT)
async def test_a_transient_fault_is_tried_again(fault: str):
    endpoint = Endpoint(TRANSIENT[fault], lambda _http, mark: completion(f"VOTE {mark}: +1"))
    async with judging(endpoint) as judge:
        assert await judge.vote(CASE) == Vote(1)
    assert len(endpoint.bodies) == 2


WRONG = {
    "status 401": lambda _http, _mark: web.Response(status=401, text="who?"),
    "status 404": lambda _http, _mark: web.Response(status=404),
    "status 307": lambda _http, _mark: web.Response(status=307, headers={"Location": "http://127.0.0.1:1/"}),
    "no chat completion": lambda _http, _mark: web.json_response({"choices": []}),
    "content": lambda _http, _mark: completion(None),
    "codec": lambda _http, _mark: web.Response(body=b'{"choices": [{"message": {"content": "\xff"}}]}'),
    "JSON": lambda _http, _mark: web.Response(text="VOTE"),
    "expected VOTE": lambda _http, _mark: completion("score: +1"),
}


@pytest.mark.parametrize("words", WRONG)
async def test_a_wrong_answer_is_no_vote_and_is_not_tried_again(words: str):
    endpoint = Endpoint(WRONG[words])
    async with judging(endpoint) as judge:
        with pytest.raises(VoteFailed, match=words):
            await judge.vote(CASE)
    assert len(endpoint.bodies) == 1


async def silent(_http: web.Request, _mark: str) -> web.Response:
    await asyncio.sleep(600)
    return web.Response()


@pytest.mark.parametrize(("answer", "last"), [(silent, "no answer"), (TRANSIENT["500"], "status 500: oops")])
async def test_a_vote_that_takes_too_long_is_given_up(answer: Answer, last: str):
    words = ""
    for deadline_s in (0.4, 4.0, 40.0):  # a loaded machine may have had no answer by then
        async with judging(Endpoint(answer), deadline_s=deadline_s) as judge:
            with pytest.raises(VoteFailed, match=f"no answer from .* within {deadline_s:g} s; last: ") as failed:
                await judge.vote(CASE)
        if (words := str(failed.value)).endswith(last):
            break
    assert words.endswith(last)
