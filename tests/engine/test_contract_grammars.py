"""Forms of an answer: a real SGLang with a tokenizer keeps to them, and what has no grammars refuses them."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from asyncrl.engine.client import EngineClient, EngineRefused, SamplingParams
from benchmarks.engine import save_random_model
from harness.contract import Served
from harness.sglang_real import ABSENT, EXACT, FOUND, GRAMMARS, ask, engine, events_in, post
from harness.tokenizers import make_model

pytestmark = pytest.mark.slow

_SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
_SAMPLING = {"max_new_tokens": 100}
FORMS = [{"json_schema": json.dumps(_SCHEMA)}, {"regex": "(yes|no)(, (yes|no)){2}"}]


@pytest.fixture(scope="module", params=["embedded", "sglang", "sglang-grammars"])
def served(request: Any, tmp_path_factory: Any) -> Iterator[Served]:
    kind, _, grammars = request.param.partition("-")
    if kind == "sglang" and not FOUND:
        pytest.skip(ABSENT)
    folder = tmp_path_factory.mktemp("grammars")
    model = folder / "model"
    model.mkdir()
    save_random_model(model, vocab=330, hidden=32 if EXACT else 256, layers=2)
    make_model(model)
    config = json.loads((model / "config.json").read_text()) | {"eos_token_id": 1}
    (model / "config.json").write_text(json.dumps(config))
    with asyncio.Runner() as runner:
        server = engine(kind, model, folder / "home", incremental=True, grammars=grammars and GRAMMARS)
        yield Served(request.param, True, runner.run(server.__aenter__()), model)
        runner.run(server.__aexit__(None, None, None))


def _fits(form: dict[str, str], text: str) -> bool:
    if "regex" in form:
        return re.fullmatch(form["regex"], text) is not None
    found = json.loads(text)
    return found.keys() == {"city", "warm"} and found["city"] in ("Bern", "Oslo") and found["warm"] in (True, False)


def _text(served: Served, ids: list[int]) -> str:
    return str(Tokenizer.from_file(str(served.model / "tokenizer.json")).decode(ids))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
async def test_an_answer_has_the_form_that_was_asked_for_or_the_request_is_refused(
    served: Served, form: dict[str, str]
):
    bodies = [ask(input_ids=[5, 6, 7 + number], sampling_params={**_SAMPLING, **form}) for number in range(4)]
    answers = await asyncio.gather(*(post(served, "/generate", body) for body in bodies))

    if served.kind != "sglang-grammars":
        assert [status for status, _ in answers] == [400] * len(bodies)
        assert all("grammar" in json.dumps(answer) or next(iter(form)) in json.dumps(answer) for _, answer in answers)
        return
    for status, answer in answers:
        meta = answer["meta_info"]
        assert status == 200 and meta["finish_reason"]["type"] == "stop"
        assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
        assert _fits(form, _text(served, answer["output_ids"]))


async def test_a_form_comes_in_parts_through_the_client_with_the_log_probs_of_its_tokens(served: Served):
    client, chunks = EngineClient(served.address, api_key="secret"), []
    sampling = SamplingParams(100, schema=json.dumps(_SCHEMA), top=2)
    try:
        if served.kind != "sglang-grammars":
            with pytest.raises(EngineRefused):
                await client.generate([5, 6, 7], sampling)
            return
        generation = await client.generate([5, 6, 7], sampling, on_tokens=chunks.append, stream_interval=4)
    finally:
        await client.close()

    assert generation.finish_reason == "stop" and len(chunks) > 1
    assert _fits(FORMS[0], _text(served, generation.token_ids.tolist()))
    assert len(generation.logprobs) == len(generation.likeliest) == len(generation.token_ids)
    assert (generation.logprobs <= 0).all()


async def test_a_form_that_is_none_is_refused_and_the_server_goes_on(served: Served):
    bad = {**_SAMPLING, "regex": "(unclosed"}
    status, answer = await post(served, "/generate", ask(sampling_params=bad))
    stream = ask(stream=True, sampling_params={**_SAMPLING, "json_schema": "{"})
    async with served.session() as session, session.post("/generate", json=stream) as response:
        streamed, raw = response.status, await response.text()

    assert status == 400 and answer
    assert streamed == 400 or events_in(raw)[-1].get("error") or events_in(raw)[-1]["meta_info"]["finish_reason"]
    status, answer = await post(served, "/generate", ask(sampling_params={"max_new_tokens": 2, "ignore_eos": True}))
    assert (status, len(answer["output_ids"])) == (200, 2)
