"""Faults of one request concern that one alone: a client against a server that answers as SGLang does."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncrl.engine.batching import BUSY
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.errors import EngineOverloaded, EngineRefused, EngineUnavailable, RequestFailed
from harness.sglang_like import Asked, Fault, LikeSGLang, like_sglang
from harness.stage import DEADLINE_S, until

POISON = 29
SOME = SamplingParams(4)


@pytest.fixture
async def server() -> AsyncIterator[LikeSGLang]:
    async with like_sglang() as server:
        yield server


@pytest.fixture
async def client(server: LikeSGLang) -> AsyncIterator[EngineClient]:
    client = EngineClient(server.address, generate_timeout_s=20)
    yield client
    await client.close()


async def ask_all(client: EngineClient, *prompts: list[int], **options: Any) -> list[Any]:
    return await asyncio.gather(*(client.generate(ids, SOME, **options) for ids in prompts), return_exceptions=True)


@pytest.mark.parametrize(("status", "kind"), [(500, RequestFailed), (502, RequestFailed), (400, EngineRefused)])
async def test_a_request_that_the_server_fails_on_does_not_fail_those_beside_it(
    server: LikeSGLang, client: EngineClient, status: int, kind: type[Exception]
):
    async def serve(asked: Asked) -> dict[str, Any]:
        if POISON in asked.ids:
            raise Fault(status, "Internal Server Error: token 29")
        return await server.whole(asked)

    server.serve = serve

    well, ill, also_well = await ask_all(client, [5], [POISON], [7])

    assert [len(answer.token_ids) for answer in (well, also_well)] == [4, 4]
    assert type(ill) is kind
    assert "Internal Server Error: token 29" in str(ill)
    assert [asked.together for asked in server.asked] == [3, 3, 3, 1, 1, 1]  # after the fault each was sent alone


async def test_a_busy_engine_gets_generations_of_several_turns_of_the_loop_in_one_request(
    server: LikeSGLang, client: EngineClient
):
    full, release = asyncio.Event(), asyncio.Event()

    async def serve(asked: Asked) -> dict[str, Any]:
        if len(server.asked) >= BUSY:
            full.set()
        await release.wait()
        return await server.whole(asked)

    server.serve = serve
    async with asyncio.TaskGroup() as tasks:
        for _ in range(BUSY):
            tasks.create_task(client.generate([5], SOME))
        await full.wait()
        for token in (6, 7):
            tasks.create_task(client.generate([token], SOME))
            await asyncio.sleep(0)  # the next turn of the loop
        release.set()

    assert [asked.together for asked in server.asked[BUSY:]] == [2, 2]


async def test_a_server_without_room_is_overloaded_and_is_not_sent_the_same_at_once(
    server: LikeSGLang, client: EngineClient
):
    async def serve(asked: Asked) -> dict[str, Any]:
        raise Fault(503, "The request queue is full.")

    server.serve = serve

    answers = await ask_all(client, [5], [6], [7])

    assert [type(answer) for answer in answers] == [EngineOverloaded] * 3
    assert "The request queue is full." in str(answers[0])
    assert server.http_requests == 1


@pytest.mark.parametrize(("streamed", "given"), [(False, None), (True, None), (True, -1e39)])
async def test_a_log_prob_that_is_no_number_is_an_error_of_that_answer(
    server: LikeSGLang, client: EngineClient, streamed: bool, given: float | None
):
    async def serve(asked: Asked) -> dict[str, Any]:
        answer = await server.whole(asked)
        if POISON in asked.ids:
            answer["meta_info"]["output_token_logprobs"][2][0] = given
        return answer

    server.serve = serve
    told: list[Any] = []
    options = {"on_tokens": told.append} if streamed else {}

    [alone] = await ask_all(client, [POISON], **options)
    well, ill = await ask_all(client, [5], [POISON], **options)

    assert type(alone) is type(ill) is RequestFailed
    assert "expected the natural logarithm of a probability" in str(ill)
    assert well.logprobs.tolist() == [-1.0] * 4
    assert all(-1.0 in chunk.logprobs and 0.0 not in chunk.logprobs for chunk in told)


@pytest.mark.parametrize(
    ("code", "kind"), [(400, EngineRefused), (503, EngineOverloaded), (500, RequestFailed), (429, EngineOverloaded)]
)
async def test_an_abort_with_a_status_inside_a_stream_is_a_fault_of_that_member(
    server: LikeSGLang, client: EngineClient, code: int, kind: type[Exception]
):
    async def serve(asked: Asked) -> dict[str, Any]:
        if POISON not in asked.ids:
            return await server.whole(asked)
        reason = {"type": "abort", "message": "Request waiting timeout reached.", "status_code": code}
        return server.answer(asked, [], finish_reason=reason)

    server.serve = serve

    well, ill = await ask_all(client, [5], [POISON])

    assert len(well.token_ids) == 4
    assert type(ill) is kind
    assert "Request waiting timeout reached." in str(ill)


async def test_an_event_that_straddles_an_update_is_divided_as_the_engine_reports(
    server: LikeSGLang, client: EngineClient
):
    """The spans of newer servers; without them all tokens of an event have its label."""

    async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        spans = [{"version": "old", "start": 0, "end": 3}, {"version": "new", "start": 3, "end": 5}]
        yield server.answer(asked, [4, 5], None, weight_version="old", weight_versions=spans[:1])
        yield server.answer(asked, [6, 7, 8], None, weight_version="new", weight_versions=spans)
        yield server.answer(asked, [9], "length", weight_version="newest")

    server.events = events
    chunks: list[Any] = []

    [answer] = await ask_all(client, [5], on_tokens=chunks.append)

    assert [(chunk.weight_version, chunk.token_ids.tolist()) for chunk in chunks] == [
        *(("old", [4, 5]), ("old", [6]), ("new", [7, 8]), ("newest", [9])),
    ]
    assert [(span.version, span.start, span.end) for span in answer.weight_versions] == [
        *(("old", 0, 3), ("new", 3, 5), ("newest", 5, 6)),
    ]


@pytest.mark.parametrize("cumulative", [True, False])
async def test_events_that_repeat_what_came_and_events_that_do_not_make_the_same_answer(
    server: LikeSGLang, client: EngineClient, cumulative: bool
):
    async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        for part in ([4, 5], [6], [], [7, 8]):
            event = server.answer(asked, part, None if part != [7, 8] else "stop")
            event["output_ids"] = list(asked.cumulative) if cumulative else part
            triples = [[-float(token), token, None] for token in event["output_ids"]]
            event["meta_info"]["output_token_logprobs"] = triples
            yield event

    server.events = events
    chunks: list[Any] = []

    [answer] = await ask_all(client, [5], on_tokens=chunks.append)

    assert answer.token_ids.tolist() == [4, 5, 6, 7, 8]
    assert answer.logprobs.tolist() == [-4, -5, -6, -7, -8]
    assert [chunk.token_ids.tolist() for chunk in chunks] == [[4, 5], [6], [7, 8]]


async def test_a_request_that_never_started_comes_back_empty_and_so_does_one_aborted_in_the_queue(
    server: LikeSGLang, client: EngineClient
):
    """499 before the scheduler had it; in its queue, an answer without most fields, and in a stream its last token."""

    async def never_started(_: Asked) -> dict[str, Any]:
        raise Fault(499, "Client closed request")

    async def in_the_queue(asked: Asked) -> dict[str, Any]:
        reason = {"type": "abort", "message": "Abort in waiting queue"}
        return {"meta_info": {"id": asked.rid, "finish_reason": reason, "weight_version": "default"}}

    async def retracted(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        yield server.answer(asked, [4, 5, 6], None)
        thin = {"id": asked.rid, "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
        thin |= {"completion_tokens": 9, "output_token_logprobs": [[-1.0, 12, None]]}
        yield {"output_ids": [12], "meta_info": thin}

    for serve in (never_started, in_the_queue):
        server.serve = serve
        for answer in await ask_all(client, [5], [6]) + await ask_all(client, [5]):
            assert (answer.token_ids.tolist(), answer.finish_reason) == ([], "abort")
    server.events = retracted

    [answer] = await ask_all(client, [5], on_tokens=lambda chunk: None)

    assert (answer.token_ids.tolist(), answer.finish_reason) == ([4, 5, 6], "abort")


async def test_an_abort_of_one_request_meets_no_other_whose_id_it_begins(server: LikeSGLang, client: EngineClient):
    """SGLang matches ids by prefix."""
    server.serve = server.until_aborted

    asked = [asyncio.create_task(client.generate([5], SOME, alone=True)) for _ in range(40)]
    await until(lambda: len(server.running) == 40, "all are there")
    asked[0].cancel()
    await until(lambda: bool(server.aborted), "the server is told")

    assert server.ended == server.aborted  # one id, and no further one that begins like it
    await client.abort_all()
    assert {answer.finish_reason for answer in await asyncio.gather(*asked[1:])} == {"abort"}


async def test_a_server_whose_load_shows_none_of_what_runs_is_emptied_all_the_same(
    server: LikeSGLang, client: EngineClient
):
    server.serve, server.steps = server.until_aborted, 2
    call = asyncio.create_task(client.generate([1], SamplingParams(4)))
    await until(lambda: len(server.running) == 1, "the request runs")
    assert (await client.load()).requests == 0

    await client.empty()

    assert not server.running
    assert (await call).finish_reason == "abort"


async def test_a_request_whose_connection_broke_is_not_sampled_twice_by_the_same_call(
    server: LikeSGLang, client: EngineClient
):
    async def serve(_: Asked) -> dict[str, Any]:
        raise ConnectionError

    server.serve = serve

    for answers in (await ask_all(client, [5], [6]), await ask_all(client, [7])):
        assert {type(answer) for answer in answers} == {EngineUnavailable}

    assert sorted(asked.ids for asked in server.asked) == [[5], [6], [7]]
    assert len({asked.rid for asked in server.asked}) == 3


@pytest.mark.parametrize(("code", "kind"), [(400, EngineRefused), (503, EngineOverloaded), (500, RequestFailed)])
async def test_an_error_event_distinguishes_a_passing_overload_from_a_refusal(
    server: LikeSGLang, client: EngineClient, code: int, kind: type[Exception]
):
    async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        yield server.answer(asked, [4], None)
        raise Fault(code, "not now")

    server.events = events
    chunks: list[Any] = []

    [answer] = await ask_all(client, [5], on_tokens=chunks.append)

    assert type(answer) is kind
    assert [chunk.token_ids.tolist() for chunk in chunks] == [[4]]


async def test_a_stream_that_breaks_off_splices_no_two_generations(server: LikeSGLang, client: EngineClient):
    """Those with tokens come back with them as aborted ones do; those without are sent again."""

    async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        if asked.together > 1 and asked.ids == [5]:
            yield server.answer(asked, [11, 12], None)
            raise Fault(500, "a scheduler's fault")
        if asked.together > 1:
            await asyncio.sleep(0)
            yield server.answer(asked, [], None)
            await asyncio.Event().wait()
        yield server.answer(asked, asked.tokens())

    server.events = events

    begun, fresh = await ask_all(client, [5], [7], on_tokens=lambda chunk: None)

    assert (begun.token_ids.tolist(), begun.finish_reason) == ([11, 12], "abort")
    assert (len(fresh.token_ids), fresh.finish_reason) == (4, "length")


async def test_each_stream_of_a_batch_has_a_deadline_of_its_own(server: LikeSGLang):
    client = EngineClient(server.address, generate_timeout_s=2.0)

    async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        if asked.ids == [POISON]:
            await asyncio.Event().wait()
        while not server.aborted:  # the other has had its deadline
            yield server.answer(asked, [4], None)
            await asyncio.sleep(0.1)
        yield server.answer(asked, [4], "length")

    async def one_event(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        yield {"output_ids": [], "meta_info": {"id": asked.rid, "finish_reason": None, "completion_tokens": 0}}
        async for event in events(asked):
            yield event

    server.events = one_event

    slow, silent = await ask_all(client, [5], [POISON], on_tokens=lambda chunk: None)
    rids = [asked.rid for asked in server.asked if asked.ids == [POISON]]
    await until(lambda: server.aborted == rids, "the server is told")
    await client.close()

    assert (len(slow.token_ids) > 1, slow.finish_reason) == (True, "length")
    assert type(silent) is RequestFailed
    assert "no token for 2 s" in str(silent)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("together", [1, 3])
async def test_a_connection_is_used_again_after_each_answer(
    server: LikeSGLang, client: EngineClient, streamed: bool, together: int
):
    options = {"on_tokens": lambda chunk: True} if streamed else {}

    for _ in range(4):
        answers = await ask_all(client, *([5] for _ in range(together)), **options)

        assert [len(answer.token_ids) for answer in answers] == [4] * together
        await asyncio.wait_for(client.health(), DEADLINE_S)  # time to read the end of the stream

    assert server.http_requests == 4
    assert len(server.connections) <= 2  # health may have been asked for on a second one


async def test_a_caller_that_wants_no_more_ends_its_generation_at_that_chunk(server: LikeSGLang, client: EngineClient):
    async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        yield server.answer(asked, [4], None)
        yield server.answer(asked, [5], None)
        if asked.ids == [POISON]:
            await asyncio.Event().wait()  # for as long as its client listens
        yield server.answer(asked, [6])

    server.events = events
    told: list[int] = []

    def take(chunk: Any) -> bool:
        told.extend(chunk.token_ids.tolist())
        return False

    left, whole = await asyncio.gather(
        client.generate([POISON], SOME, on_tokens=take), client.generate([5], SOME, on_tokens=lambda chunk: None)
    )

    assert told == [4]
    assert (left.token_ids.tolist(), left.finish_reason) == ([4], "abort")
    assert whole.token_ids.tolist() == [4, 5, 6]
    await until(lambda: server.aborted == [server.asked[0].rid], "the server is told")


async def test_a_callback_that_raises_is_the_callers_own_fault(server: LikeSGLang, client: EngineClient):
    def take(chunk: Any) -> None:
        raise LookupError("mine")

    ill, well = await asyncio.gather(
        client.generate([5], SOME, on_tokens=take), client.generate([6], SOME), return_exceptions=True
    )

    assert isinstance(ill, LookupError)
    assert len(well.token_ids) == 4  # type: ignore[union-attr]


async def test_what_is_in_flight_when_a_client_is_closed_was_not_cancelled_by_its_caller(
    server: LikeSGLang, client: EngineClient
):
    begun = asyncio.Event()

    async def serve(asked: Asked) -> dict[str, Any]:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    server.serve = serve
    call = asyncio.create_task(client.generate([5], SOME))
    await begun.wait()

    await client.close()

    with pytest.raises(EngineUnavailable, match="closed"):
        await call
