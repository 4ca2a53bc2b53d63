"""Contract of the embedded engine and a real SGLang 0.5.17: the same cases against both."""

import asyncio
import json
import shutil

import aiohttp
import numpy as np
import pytest

from asyncrl.engine.client import EngineRefused, SamplingParams
from harness.client_contract import (  # noqa: F401 - pytest runs the imported cases
    begin,
    test_a_pause_that_aborts_returns_partials_and_holds_later_requests,
    test_an_aborted_request_returns_what_it_has,
    test_chunks_add_up_to_the_generation,
    test_continue_without_a_pause_is_no_fault,
    test_generations_asked_for_together_end_apart,
    test_greedy_answers_of_both_kinds_agree,
    test_more_requests_than_slots_wait_and_all_are_answered,
    test_the_likeliest_tokens_in_the_places_of_sampled_ones,
)
from harness.contract import CONTEXT, LONG_TOKENS, WHOLE_TOKENS
from harness.sglang_real import EXACT, ask, events_in, get, post, scores

pytestmark = pytest.mark.slow


# -- answers -----------------------------------------------------------------------------------------------------


async def test_an_answer(served):
    status, answer = await post(served, "/generate", ask(rid="me"))

    meta = answer["meta_info"]
    assert status == 200
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (
        "me",
        3,
        5,
        "none",
    )
    assert (meta["cached_tokens"], meta["num_retractions"]) == (0, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["output_token_logprobs_length"] == 5
    assert all(logprob < 0 and text is None for logprob, _, text in meta["output_token_logprobs"])


async def test_a_batch_is_answered_by_a_list_in_its_order(served):
    params = [{"max_new_tokens": n, "temperature": 0.0} for n in (9, 1, 4)]
    body = {"input_ids": [[1], [2, 3], [4]], "sampling_params": params, "rid": ["a", "b", "c"]}

    _, answers = await post(served, "/generate", body)

    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b", "c"]
    assert [len(answer["output_ids"]) for answer in answers] == [9, 1, 4]
    assert not answers[0]["meta_info"].get("output_token_logprobs")


async def test_a_stream(served):
    body = ask(stream=True, sampling_params={"max_new_tokens": 5, "stream_interval": 2})
    async with served.session() as session, session.post("/generate", json=body) as response:
        kind, raw = response.headers["Content-Type"], await response.text()

    events = events_in(raw)
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    held = [len(event["output_ids"]) for event in events]
    assert kind.startswith("text/event-stream") and raw.endswith("data: [DONE]\n\n")
    assert counts[0] == 1 and counts[-1] == 5 and counts == sorted(counts)  # the first one waits for no other
    assert held == ([b - a for a, b in zip([0, *counts], counts, strict=False)] if served.incremental else counts)
    assert [len(event["meta_info"]["output_token_logprobs"]) for event in events] == held
    assert [event["meta_info"]["finish_reason"] is None for event in events] == [True] * (len(events) - 1) + [False]


async def test_a_streamed_batch_names_the_member_of_each_event(served):
    params = [{"max_new_tokens": n, "stream_interval": 100} for n in (6, 2)]
    body = {"input_ids": [[1], [2]], "sampling_params": params, "stream": True}
    async with served.session() as session, session.post("/generate", json=body) as response:
        raw = await response.text()

    last = {event["index"]: event["meta_info"]["completion_tokens"] for event in events_in(raw)}
    assert last == {0: 6, 1: 2}


async def test_a_token_that_ends_is_named(served):
    _, free = await post(served, "/generate", ask(sampling_params={"max_new_tokens": 5, "temperature": 0}))
    stop = free["output_ids"][2]
    first = free["output_ids"].index(stop)
    sampling = {"max_new_tokens": 5, "temperature": 0, "stop_token_ids": [stop]}

    _, answer = await post(served, "/generate", ask(sampling_params=sampling))

    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["output_ids"] == free["output_ids"][: first + 1]


async def test_null_means_default_and_unknown_keys_beside_the_sampling_are_ignored(served):
    sampling = {"max_new_tokens": 2, "temperature": None, "stop": None, "frequency_penalty": 0.0, "n": 1}

    status, answer = await post(served, "/generate", ask(sampling_params=sampling, nobody_knows="x", rid=None))

    assert (status, len(answer["output_ids"])) == (200, 2)


@pytest.mark.parametrize(
    "body",
    [
        ask(sampling_params={"temperature": -1}),
        ask(sampling_params={"top_p": 0}),
        ask(sampling_params={"top_k": 0}),
        ask(sampling_params={"min_p": 2}),
        ask(sampling_params={"min_new_tokens": 9, "max_new_tokens": 3}),
        ask(input_ids=[1] * CONTEXT),
        ask(input_ids=[]),
        ask(input_ids="hello"),
        ask(input_ids=[[1], [2]], rid=["a", "a"]),
        {"sampling_params": {}},
    ],
    ids=lambda body: str(body)[:60],
)
async def test_a_bad_request_is_a_400_with_a_message(served, body):
    status, answer = await post(served, "/generate", body)

    assert status == 400
    assert answer.get("message") or answer["error"]["message"]


async def test_an_id_in_flight_is_not_taken_twice(served, client):
    body = ask(rid="twice", stream=True, sampling_params={"max_new_tokens": LONG_TOKENS, "stream_interval": 1})
    async with served.session() as session, session.post("/generate", json=body) as response:
        await response.content.readline()
        status, answer = await post(served, "/generate", ask(rid="twice"))

    assert status == 400 and "Duplicate request ID" in json.dumps(answer)


async def test_prefixes_are_shared_within_an_extra_key_only(served, client):
    prompt = list(range(1, 41))
    sampling = {"max_new_tokens": 1}

    async def cached(key):
        _, answer = await post(served, "/generate", ask(input_ids=prompt, sampling_params=sampling, extra_key=key))
        return answer["meta_info"]["cached_tokens"]

    assert [await cached(key) for key in ("v1", "v2")] == [0, 0]
    assert min([await cached(key) for key in ("v1", "v2")]) >= 32


@pytest.mark.parametrize("new", [0, 1])
async def test_log_probs_of_a_prompt_and_its_likeliest_tokens(served, new):
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    options = {"input_ids": prompt, "logprob_start_len": 2, "top_logprobs_num": 4}

    _, answer = await post(served, "/generate", ask(sampling_params={"max_new_tokens": new}, **options))

    meta = answer["meta_info"]
    assert (len(answer["output_ids"]), meta["prompt_tokens"]) == (new, 8)
    assert [token for _, token, _ in meta["input_token_logprobs"]] == prompt[2:]
    assert meta["input_token_logprobs"][0][0] is None
    expected = scores(served.model, prompt[:3], prompt[3:])
    close = 1e-3 if EXACT or served.kind == "embedded" else 0.1
    assert np.abs(expected - [logprob for logprob, _, _ in meta["input_token_logprobs"][1:]]).max() < close
    first, *places = meta["input_top_logprobs"]
    assert first is None
    for place, (logprob, token, _) in zip(places, meta["input_token_logprobs"][1:], strict=True):
        values = [value for value, _, _ in place]
        assert len(place) == 4 and values == sorted(values, reverse=True)
        assert logprob <= values[0] + close
        assert all(abs(value - logprob) < close for value, other, _ in place if other == token)
    likeliest = scores(served.model, prompt[:5], [places[2][0][1]])
    assert abs(likeliest[0] - places[2][0][0]) < close


# -- differences listed in docs/internals/fidelity.md --


@pytest.mark.parametrize(
    ("body", "embedded", "sglang"),
    [
        (ask(sampling_params={"temprature": 1}), 400, 500),
        (ask(sampling_params={"max_new_tokens": "many"}), 400, 500),
        (ask(input_ids=[[1], [2]], sampling_params=[{}]), 400, 500),
        (ask(sampling_params={"max_new_tokens": 2, "n": 2}), 400, 200),
        (ask(sampling_params={"max_new_tokens": 2, "frequency_penalty": 0.5}), 400, 200),
    ],
    ids=lambda part: str(part)[:60],
)
async def test_requests_that_the_kinds_answer_differently(served, client, body, embedded, sglang):
    status, _ = await post(served, "/generate", body)

    assert status == {"embedded": embedded, "sglang": sglang}[served.kind]
    assert len((await client.generate([1], SamplingParams(2))).token_ids) == 2


async def test_spans_of_versions_come_from_the_embedded_engine_alone(served, client):
    call = await begin(client, WHOLE_TOKENS)
    await client.pause("in_place")
    await client.update_weights(served.model, "1", flush_cache=False)
    await client.continue_generation()
    generation = await call

    # SGLang 0.5.17 labels an answer with the version at its end; the client brackets by what each chunk carried.
    assert [span.version for span in generation.weight_versions] == ["none", "1"]
    _, answer = await post(served, "/generate", ask())
    assert ("weight_versions" in answer["meta_info"]) == (served.kind == "embedded")


# -- information -------------------------------------------------------------------------------------------------


async def test_what_a_router_reads(served):
    assert await get(served, "/health") == (200, "")
    _, model = await get(served, "/model_info")
    _, server = await get(served, "/server_info")
    _, loads = await get(served, "/v1/loads")

    assert (model["weight_version"], model["is_generation"]) == ("none", True)
    assert (model["model_path"], model["architectures"]) == (str(served.model), ["Qwen3ForCausalLM"])
    expected = {"tp_size": 1, "dp_size": 1, "disaggregation_mode": "null", "load_balance_method": "round_robin"}
    assert {name: server[name] for name in expected} == expected
    for name in ("max_running_requests", "served_model_name", "internal_states", "version", "weight_version"):
        assert name in server
    (load,) = loads["loads"]
    for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_running_requests", "token_usage"):
        assert load[name] >= 0


async def test_the_key_guards_everything_but_health(served):
    found = {}
    async with aiohttp.ClientSession(served.address) as session:
        for method, path in (("GET", "/health"), ("GET", "/model_info"), ("POST", "/generate"), ("GET", "/v1/loads")):
            async with session.request(method, path) as response:
                found[path] = response.status

    assert found == {"/health": 200, "/model_info": 401, "/generate": 401, "/v1/loads": 401}


# -- aborts ------------------------------------------------------------------------------------------------------


async def test_an_abort_of_one_leaves_the_others_and_an_unknown_id_is_no_fault(served, client):
    def body(rid, tokens):
        return ask(rid=rid, sampling_params={"max_new_tokens": tokens, "ignore_eos": True})

    other = asyncio.create_task(post(served, "/generate", body("other", WHOLE_TOKENS)))
    stream = {**body("mine", LONG_TOKENS), "stream": True}
    async with served.session() as session, session.post("/generate", json=stream) as response:
        first = (await response.content.readline()).decode()
        assert (await post(served, "/abort_request", {"rid": "nobody"}))[0] == 200
        assert (await post(served, "/abort_request", {"rid": "mine"}))[0] == 200
        raw = first + await response.text()

    last = events_in(raw)[-1]
    # A busy server may make all tokens before it sends the first: then nothing is left to be aborted.
    at_once = json.loads(first.removeprefix("data: "))["meta_info"]["completion_tokens"] == LONG_TOKENS
    assert at_once or last["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await other)[1]["meta_info"]["finish_reason"]["type"] == "length"


async def test_a_request_whose_client_left_is_aborted(served, client):
    body = ask(stream=True, sampling_params={"max_new_tokens": LONG_TOKENS, "ignore_eos": True, "stream_interval": 1})
    async with served.session() as session, session.post("/generate", json=body) as response:
        await response.content.readline()

    await client.wait_idle(60)


# -- pauses and updates ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_that_keeps_requests_lets_them_end_under_the_new_weights(served, client, mode):
    call = await begin(client, WHOLE_TOKENS)
    await client.pause(mode)
    assert await client.health()
    with pytest.raises(EngineRefused):
        await client.update_weights(served.model / "absent", "1", flush_cache=False)
    assert (await client.model_info())["weight_version"] == "none"
    await client.update_weights(served.model, "1", flush_cache=False)
    assert (await client.model_info())["weight_version"] == "1"
    assert not call.done()
    await client.continue_generation()
    generation = await call

    assert (generation.finish_reason, len(generation.token_ids)) == ("length", WHOLE_TOKENS)
    assert generation.weight_versions[-1].version == "1"


async def test_a_pause_of_an_unknown_mode_is_refused(served, client):
    status, _ = await post(served, "/pause_generation", {"mode": "gently"})

    assert status == 400
    assert len((await client.generate([1], SamplingParams(2))).token_ids) == 2


async def test_a_load_that_gives_no_name_keeps_the_label_and_moves_the_path(served, client, tmp_path):
    other = shutil.copytree(served.model, tmp_path / "other")
    body = {"model_path": str(other), "load_format": "auto"}
    assert (await post(served, "/update_weights_from_disk", body))[0] == 200

    info = await client.model_info()
    assert (info["weight_version"], info["model_path"]) == ("none", str(other))


async def test_the_cache_is_flushed_when_idle_and_not_while_requests_are_frozen(served, client):
    assert (await post(served, "/flush_cache", {}))[0] == 200
    call = await begin(client)
    await client.pause("in_place")
    assert (await post(served, "/flush_cache", {}))[0] == 400
    await client.continue_generation()
    await client.abort_all()
    await call


# -- the client --------------------------------------------------------------------------------------------------
