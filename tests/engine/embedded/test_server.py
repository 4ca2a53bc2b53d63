import asyncio
import contextlib
import json
import socket

import aiohttp
import numpy as np
import pytest

from asyncrl.engine.client import EngineClient, EngineRefused, EngineUnavailable, SamplingParams, VersionSpan
from asyncrl.engine.errors import RequestFailed
from benchmarks.engine import save_random_model, served
from harness.contract import CONTEXT, LONG_TOKENS, VOCAB, WHOLE_TOKENS, widen
from harness.stage import until

LONG = SamplingParams(LONG_TOKENS)
OPTIONS = ("--max-running-requests", "8", "--weight-version", "0", "--api-key-file")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_random_model(directory, vocab=VOCAB, hidden=32, layers=2)
    widen(directory)
    return directory


@pytest.fixture(scope="module")
def addresses(model, tmp_path_factory):
    """A server with cumulative and one with incremental events, for all tests of this file."""
    key_file = tmp_path_factory.mktemp("key") / "key"
    key_file.write_text("secret\n")
    options = (*OPTIONS, str(key_file), "--context-length", str(CONTEXT))
    loop = asyncio.new_event_loop()
    stack = contextlib.AsyncExitStack()
    kinds = {"cumulative": served(model, *options, incremental=False), "incremental": served(model, *options)}
    yield {kind: loop.run_until_complete(stack.enter_async_context(server)) for kind, server in kinds.items()}
    loop.run_until_complete(stack.aclose())
    loop.close()


@pytest.fixture(params=["cumulative", "incremental"])
async def any_client(request, addresses):
    client = EngineClient(addresses[request.param], api_key="secret")
    yield client
    await client.close()


@pytest.fixture
async def client(addresses):
    client = EngineClient(addresses["incremental"], api_key="secret")
    yield client
    await client.close()


@pytest.fixture
async def http(addresses):
    headers = {"Authorization": "Bearer secret"}
    async with aiohttp.ClientSession(addresses["cumulative"], headers=headers) as session:
        yield session


async def post(http, path, body):
    async with http.post(path, json=body) as response:
        raw = await response.read()
        return response.status, json.loads(raw) if raw else None


def events(raw):
    return [json.loads(event.removeprefix("data: ")) for event in raw.split("\n\n") if event.startswith("data: {")]


def ask(**changes):
    return {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5}, "return_logprob": True, **changes}


# -- the wire ----------------------------------------------------------------------------------------------------


async def test_an_answer_has_sglangs_fields_and_exact_version_spans(http):
    status, answer = await post(http, "/generate", ask(rid="me"))

    meta = answer["meta_info"]
    assert status == 200
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == ("me", 3, 5, "0")
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 5}]
    assert [token for _, token, text in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["output_token_logprobs_length"] == 5
    assert all(logprob < 0 and text is None for logprob, _, text in meta["output_token_logprobs"])


@pytest.mark.parametrize(("kind", "expected"), [("cumulative", [1, 3, 5, 6]), ("incremental", [1, 2, 2, 1])])
async def test_streams_are_cumulative_by_default_and_incremental_on_request(addresses, kind, expected):
    headers = {"Authorization": "Bearer secret"}
    body = ask(stream=True, sampling_params={"max_new_tokens": 6, "stream_interval": 2})
    async with (
        aiohttp.ClientSession(addresses[kind], headers=headers) as session,
        session.post("/generate", json=body) as response,
    ):
        raw = await response.text()

    assert raw.endswith("data: [DONE]\n\n")
    assert [len(event["output_ids"]) for event in events(raw)] == expected
    assert [len(event["meta_info"]["output_token_logprobs"]) for event in events(raw)] == expected
    assert [event["meta_info"]["completion_tokens"] for event in events(raw)] == [1, 3, 5, 6]
    assert events(raw)[0]["meta_info"]["finish_reason"] is None


async def test_a_streamed_batch_names_the_member_of_each_event(http):
    params = [{"max_new_tokens": n, "stream_interval": 100} for n in (6, 2)]
    body = {"input_ids": [[1], [2]], "sampling_params": params, "stream": True}

    async with http.post("/generate", json=body) as response:
        found = events(await response.text())

    assert [(event["index"], len(event["output_ids"])) for event in found] == [(1, 2), (0, 6)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (ask(sampling_params={"temprature": 1}), "unknown field `temprature`"),
        (ask(sampling_params={"temperature": -1}), "temperature"),
        (ask(sampling_params={"top_p": 0}), "top_p"),
        (ask(sampling_params={"top_k": 0}), "top_k = 0"),
        (ask(sampling_params={"n": 2}), "sampling_params.n = 2: not served"),
        (ask(sampling_params={"min_new_tokens": 9, "max_new_tokens": 3}), "min_new_tokens = 9 is above"),
        (ask(sampling_params={"stop": ["x"]}), "stop strings need"),
        (ask(sampling_params=[{}, {}]), "2 entries for 1 prompts"),
        (ask(input_ids=[1, 64]), "token id 64 is outside the vocabulary of 64"),
        (ask(input_ids=[1] * CONTEXT), f"longer than the model's context length ({CONTEXT} tokens)"),
        (ask(input_ids=[]), "input_ids is missing or empty"),
        (ask(input_ids=[[1], []]), "input_ids is empty"),
        (ask(input_ids=[1, [2]]), "mixes token ids and lists"),
        (ask(input_ids="hello"), "Expected `array | null`"),
        (ask(text="hello"), "text is not served"),
        (ask(input_ids=[[1], [2]], rid=["a", "a"]), "Duplicate request ID"),
        (ask(top_logprobs_num=5, return_logprob=False), "top_logprobs_num without return_logprob"),
    ],
)
async def test_a_bad_request_is_a_400_with_the_reason(http, body, message):
    status, answer = await post(http, "/generate", body)

    assert status == 400
    assert message in answer["error"]["message"]


async def waits(http):
    async with http.get("/v1/loads") as response:
        return (await response.json())["loads"][0]["num_waiting_reqs"] > 0


async def test_an_id_in_flight_is_not_taken_twice(http):
    await post(http, "/pause_generation", {"mode": "in_place"})
    first = asyncio.create_task(post(http, "/generate", ask(rid="twice")))
    await until(lambda: waits(http), "the first is there")

    status, answer = await post(http, "/generate", ask(rid="twice"))
    await post(http, "/continue_generation", {})

    assert status == 400 and "Duplicate request ID" in answer["error"]["message"]
    assert (await first)[0] == 200


async def test_information_endpoints_answer_what_a_router_reads(http):
    async with http.get("/server_info") as response:
        server = await response.json()
    async with http.get("/get_model_info") as response:
        served_model = await response.json()
    async with http.get("/metrics") as response:
        metrics = await response.text()

    assert {"tp_size", "dp_size", "served_model_name", "disaggregation_mode", "load_balance_method"} <= server.keys()
    assert served_model["architectures"] == ["Qwen3ForCausalLM"] and served_model["is_generation"]
    for name in ("num_running_reqs", "generation_tokens_total", "num_requests_total"):
        assert f'sglang:{name}{{model_name="' in metrics


async def test_the_key_guards_everything_but_health_and_metrics(addresses):
    async with aiohttp.ClientSession(addresses["cumulative"]) as session:
        answers = {}
        for path in ("/health", "/health_generate", "/metrics", "/model_info", "/v1/loads", "/nowhere"):
            async with session.get(path) as response:
                answers[path] = response.status
        async with session.get("/generate") as response:
            answers["/generate"] = response.status

    assert answers == {
        "/health": 200,
        "/health_generate": 200,
        "/metrics": 200,
        "/model_info": 401,
        "/v1/loads": 401,
        "/nowhere": 404,
        "/generate": 405,
    }


async def test_a_request_whose_client_left_is_aborted(http):
    before = await aborted(http)
    sampling = {"max_new_tokens": 120, "stream_interval": 1}
    async with http.post(
        "/generate", json=ask(input_ids=[[1]] * 60, stream=True, sampling_params=sampling)
    ) as response:
        await response.content.readline()

    async with http.get("/v1/loads?wait_idle=60") as response:
        load = (await response.json())["loads"][0]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)
    assert await aborted(http) > before


async def aborted(http):
    async with http.get("/metrics") as response:
        line = next(line for line in (await response.text()).splitlines() if "num_aborted_requests_total{" in line)
    return float(line.split()[-1])


# -- the client --------------------------------------------------------------------------------------------------


async def test_the_client_returns_arrays_spans_and_the_reason(any_client):
    generation = await any_client.generate(np.array([1, 2, 3], np.int32), SamplingParams(7, seed=3))

    assert generation.token_ids.dtype == np.int32 and generation.logprobs.dtype == np.float32
    assert len(generation.token_ids) == len(generation.logprobs) == 7
    assert generation.finish_reason == "length"
    assert generation.weight_versions == [VersionSpan("0", 0, 7)]


async def test_chunks_add_up_to_the_generation_in_both_forms_of_streaming(any_client):
    chunks = []

    generation = await any_client.generate([1, 2], SamplingParams(11), on_tokens=chunks.append, stream_interval=4)

    assert [len(chunk.token_ids) for chunk in chunks] == [1, 4, 4, 2]
    assert np.concatenate([chunk.token_ids for chunk in chunks]).tolist() == generation.token_ids.tolist()
    assert np.concatenate([chunk.logprobs for chunk in chunks]).tolist() == generation.logprobs.tolist()
    assert {chunk.weight_version for chunk in chunks} == {"0"}


async def test_generations_asked_for_together_travel_together_and_end_apart(any_client):
    ended = []

    async def one(length):
        generation = await any_client.generate([length], SamplingParams(length, seed=length))
        ended.append(length)
        return generation

    lengths = [60, 3, 30, 9, 15]
    together = await asyncio.gather(*map(one, lengths))
    alone = [await any_client.generate([n], SamplingParams(n, seed=n)) for n in lengths]

    assert ended == sorted(lengths)
    assert [g.token_ids.tolist() for g in together] == [g.token_ids.tolist() for g in alone]


async def test_one_bad_prompt_does_not_fail_its_neighbours(client):
    prompts = [[1], [2], [VOCAB], [3]]

    answers = await asyncio.gather(*(client.generate(p, SamplingParams(4)) for p in prompts), return_exceptions=True)

    assert isinstance(answers[2], EngineRefused) and "token id 64" in str(answers[2])
    assert [len(answer.token_ids) for answer in answers if answer is not answers[2]] == [4, 4, 4]


async def test_more_than_one_batch_with_several_keys_and_forms_is_sorted_out(client):
    chunks = []
    asks = [
        client.generate(
            [i % 60], SamplingParams(1 + i % 5), extra_key=str(i % 2), on_tokens=[None, chunks.append][i % 3 == 0]
        )
        for i in range(150)
    ]

    answers = await asyncio.gather(*asks)

    assert [len(answer.token_ids) for answer in answers] == [1 + i % 5 for i in range(150)]
    assert sum(len(chunk.token_ids) for chunk in chunks) == sum(1 + i % 5 for i in range(0, 150, 3))


async def test_abort_all_returns_partials_and_the_engine_becomes_idle(client):
    begun = asyncio.Event()
    asks = [asyncio.create_task(client.generate([1], LONG, on_tokens=lambda _: begun.set())) for _ in range(20)]
    await begun.wait()

    await client.abort_all()
    answers = await asyncio.gather(*asks)
    await client.wait_idle(60)

    aborted = [answer for answer in answers if answer.finish_reason == "abort"]
    assert aborted
    assert all(len(answer.token_ids) == len(answer.logprobs) < LONG_TOKENS for answer in aborted)
    assert any(len(answer.token_ids) for answer in aborted)


async def test_a_cancelled_call_is_aborted_in_the_engine(client):
    call = asyncio.create_task(client.generate([1], LONG, on_tokens=lambda _: call.cancel(), stream_interval=1))
    with pytest.raises(asyncio.CancelledError):
        await call

    await client.wait_idle(60)


async def test_weights_change_under_a_running_stream_with_exact_versions(client, model):
    chunks, begun = [], asyncio.Event()

    def on_tokens(chunk):
        chunks.append(chunk)
        begun.set()

    call = asyncio.create_task(
        client.generate([1], SamplingParams(WHOLE_TOKENS), on_tokens=on_tokens, stream_interval=8)
    )
    await begun.wait()
    await client.pause("in_place")
    assert await client.health()
    with pytest.raises(EngineUnavailable, match=r"still 1 requests after 0\.05 s"):
        await client.wait_idle(0.05)
    with pytest.raises(EngineRefused, match="send flush_cache false"):
        await client.update_weights(model, "1", flush_cache=True)
    with pytest.raises(EngineRefused, match=r"no \*\.safetensors"):
        await client.update_weights(model / "absent", "1", flush_cache=False)
    await client.update_weights(model, "1", flush_cache=False)
    assert (await client.model_info())["weight_version"] == "1"
    await client.continue_generation()
    generation = await call
    await client.update_weights(model, "0", flush_cache=True)

    assert [span.version for span in generation.weight_versions] == ["0", "1"]
    change = generation.weight_versions[1].start
    assert sum(len(chunk.token_ids) for chunk in chunks if chunk.weight_version == "0") == change


async def test_a_request_for_a_version_that_is_not_there_is_told_to_come_again(client, http, model):
    async def asked(**headers):
        named = {f"X-Weight-Version-{name}": str(value) for name, value in headers.items()}
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}
        async with http.post("/generate", json=body, headers=named) as response:
            return response.status, response.headers.get("Retry-After")

    assert await asked(Min=0) == (503, "1"), "its weights have no version"
    async with http.post(
        "/update_weights_from_disk", json={"model_path": str(model), "weight_version": "0:7:d"}
    ) as done:
        assert done.status == 200
    found = [await asked(**wanted) for wanted in ({}, {"Min": 7}, {"Exact": 7}, {"Min": 3, "Exact": 7})]
    assert found == [(200, None)] * 4
    assert [await asked(Min=8), await asked(Exact=8)] == [(503, "1")] * 2, "it may still come"
    assert await asked(Exact=6) == (409, "1"), "it has gone by"
    assert [await asked(Min=-1), await asked(Exact="new")] == [(400, None)] * 2
    async with http.post("/update_weights_from_disk", json={"model_path": str(model), "weight_version": "0"}) as done:
        assert done.status == 200


async def test_a_pause_that_aborts_holds_later_requests_until_continue(client, addresses):
    begun = asyncio.Event()
    call = asyncio.create_task(client.generate([1], LONG, on_tokens=lambda _: begun.set(), stream_interval=1))
    await begun.wait()

    await client.pause("abort")
    assert (await call).finish_reason == "abort"
    later = asyncio.create_task(client.generate([2], SamplingParams(3)))
    headers = {"Authorization": "Bearer secret"}
    async with (
        aiohttp.ClientSession(addresses["incremental"], headers=headers) as session,
        session.post("/flush_cache") as response,
    ):
        assert response.status == 200
    await asyncio.sleep(0.02)
    assert not later.done()
    await client.continue_generation()

    assert (await later).finish_reason == "length"


async def test_no_engine_is_unavailable_and_a_wrong_key_is_named(addresses):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = EngineClient(f"http://127.0.0.1:{taken.getsockname()[1]}")
        stranger = EngineClient(addresses["cumulative"], api_key="wrong")
        try:
            with pytest.raises(EngineUnavailable, match="ClientConnectorError"):
                await nobody.generate([1], SamplingParams(1))
            assert not await nobody.health()
            with pytest.raises(RequestFailed, match="HTTP 401: Unauthorized"):
                await stranger.model_info()
        finally:
            await nobody.close()
            await stranger.close()
