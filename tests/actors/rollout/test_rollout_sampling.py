"""Sampling of a rollout worker when servers fail, are overloaded, restarted or relabelled: one worker, real HTTP."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.config.settings import Config, RolloutSettings
from asyncrl.training.init_model import ModelShape, create_model
from harness.sglang_like import Asked, Fault, LikeSGLang, like_sglang
from harness.stage import Stage, until
from harness.tokenizers import QWEN3, make_model
from harness.workers import KEY, SLOTS, Worker
from topics.prompts import PromptRow


@pytest.fixture
async def inference() -> AsyncIterator[LikeSGLang]:
    async with like_sglang() as inference:
        inference.weight_version = KEY
        yield inference


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    create_model(directory, alphabet=Config().model.create.alphabet, seed=1, shape=ModelShape(context=512))
    return directory


@pytest.fixture
async def begin(bus: Bus, stage: Callable[..., Stage], model: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts a worker; arguments are settings of `rollout`."""
    begun: list[Worker] = []

    async def begin(path: Path = model, **rollout: Any) -> Worker:
        made = stage(
            model={"path": str(path)},
            engine={"kind": "external", "addresses": ["http://127.0.0.1:1"]},
            rollout={"max_new_tokens": 8, "slots": SLOTS, **rollout},
        )
        worker = Worker(bus, made)
        begun.append(worker)
        await worker.start()
        return worker

    yield begin
    for worker in begun:
        await worker.stop()


@pytest.mark.parametrize(
    ("longest", "given", "bound"),
    [(256, 0, 64), (1000, 0, 250), (2048, 0, 512), (100_000, 0, 512), (16, 0, 64), (2048, 7, 7)],
)
def test_a_killed_worker_loses_at_most_a_quarter_or_512_tokens(longest: int, given: int, bound: int):
    assert RolloutSettings(max_new_tokens=longest, progress_tokens=given).progress_limit == bound


@pytest.fixture
def thinking_model(model: Path, tmp_path: Path) -> Path:
    """A base model: `</think>` is special, and its turns end with a token that its other files do not name."""
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    special = ("<|endoftext|>", "<|im_start|>", "<think>", "</think>", "<|im_end|>")
    make_model(tmp_path, template=QWEN3, special=special, eos="<|endoftext|>")
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_bytes()) | {"vocab_size": 400, "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(("skip", "text"), [(False, "<think>hm</think>Yes"), (True, "hmYes")])
async def test_rewards_get_special_tokens_and_a_request_names_the_end_of_a_turn(
    inference: LikeSGLang, begin: Any, thinking_model: Path, skip: bool, text: str
):
    worker = await begin(thinking_model, skip_special_tokens=skip)
    tokenizer = worker.worker.tools.tokenizer

    async def reply(asked: Asked) -> dict[str, Any]:
        return inference.answer(asked, tokenizer.encode("<think>hm</think>Yes<|im_end|>").tolist(), "stop")

    inference.serve = reply
    await worker.ready(inference.address)
    await worker.issue("p000000-0", prompt="a")
    await until(lambda: bool(worker.results), "a result")

    assert worker.results["p000000-0"].completion == text
    assert inference.asked[0].sampling["stop_token_ids"] == [4]


POISON = "^zzz="  # a prompt that the server cannot serve
WELL = [f"p{number:06d}-0" for number in range(19)]
ILL = "p000077-0"


def is_poison(asked: Asked, worker: Worker) -> bool:
    poison = worker.worker.tools.tokenizer.encode(POISON).tolist()
    return asked.ids[: len(poison)] == poison


async def ends_alone(worker: Worker, inference: LikeSGLang, words: str) -> None:
    """The poisonous request ends with the server's words, and the others as if it were not there."""
    await worker.issue(WELL[0], ILL, prompt=POISON)
    await worker.issue(*WELL[1:])
    await until(lambda: len(worker.results) == len(WELL) - 1, f"all results; {len(worker.results)} came")
    await until(lambda: len(worker.failures) == 2, "the two claims of failure")

    assert worker.failures[ILL].reason == "refused"
    assert words in worker.failures[ILL].detail
    assert len([asked for asked in inference.asked if is_poison(asked, worker)]) <= 2 * 6


@pytest.mark.parametrize(
    ("status", "words"),
    [(500, "4 requests failed without a token between them, the last: engine-1: HTTP 500"), (400, "out of luck")],
)
async def test_a_request_that_the_server_fails_on_or_refuses_ends_alone(
    inference: LikeSGLang, begin: Any, status: int, words: str
):
    worker = await begin()

    async def serve(asked: Asked) -> dict[str, Any]:
        if is_poison(asked, worker):
            raise Fault(status, "Internal Server Error: out of luck")
        return await inference.whole(asked)

    inference.serve = serve
    await worker.ready(inference.address)

    await ends_alone(worker, inference, words)
    assert "engine_unavailable" not in worker.context.vitals  # the server is well, and stayed in use


async def test_a_request_for_which_the_server_breaks_the_connection_ends_alone(inference: LikeSGLang, begin: Any):
    worker = await begin()

    async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        if is_poison(asked, worker):
            raise ConnectionError("the connection breaks")
        yield await inference.whole(asked)

    async def serve(asked: Asked) -> dict[str, Any]:
        return await anext(events(asked))

    inference.events, inference.serve = events, serve
    await worker.ready(inference.address)

    await ends_alone(worker, inference, "4 requests failed")


async def test_a_null_log_prob_is_not_trained_on(inference: LikeSGLang, begin: Any):
    worker = await begin()

    async def serve(asked: Asked) -> dict[str, Any]:
        answer = await inference.whole(asked)
        if is_poison(asked, worker):
            answer["meta_info"]["output_token_logprobs"][1][0] = None
        return answer

    inference.serve = serve
    await worker.ready(inference.address)

    await ends_alone(worker, inference, "has log-prob nan")


async def test_a_server_that_is_not_well_gets_no_more_requests_until_it_is(inference: LikeSGLang, begin: Any):
    worker = await begin()

    async def serve(asked: Asked) -> dict[str, Any]:
        if not inference.healthy:
            raise Fault(500, "the scheduler is dead")
        return await inference.whole(asked)

    inference.serve, inference.healthy = serve, False
    await worker.ready(inference.address)
    await worker.issue(*WELL)
    await until(lambda: inference.health_asked >= 3, "the server is asked again and again whether it is well")
    asked = len(inference.asked)
    before = inference.health_asked
    await until(lambda: inference.health_asked > before, "and once more")

    assert len(inference.asked) == asked
    assert not worker.failures
    inference.healthy = True
    await until(lambda: len(worker.results) == len(WELL), "all results")


async def test_an_overload_passes(inference: LikeSGLang, begin: Any):
    worker = await begin()
    refused = 0

    async def serve(asked: Asked) -> dict[str, Any]:
        nonlocal refused
        if refused < 5:
            refused += 1
            raise Fault(503, "The request queue is full.")
        return await inference.whole(asked)

    inference.serve = serve
    await worker.ready(inference.address)
    await worker.issue(WELL[0])

    await until(lambda: WELL[0] in worker.results, "a result, after more refusals than faults are forgiven")
    assert not worker.failures


async def test_tokens_of_other_weights_end_a_generation_at_their_first_chunk(inference: LikeSGLang, begin: Any):
    worker = await begin(max_new_tokens=200)
    left = asyncio.Event()

    async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        tokens = asked.tokens()
        if inference.weight_version == KEY:
            yield inference.answer(asked, tokens)
            return
        yield inference.answer(asked, tokens[:16], None)
        try:
            await asyncio.Event().wait()  # for as long as its client listens
        finally:
            left.set()

    inference.events, inference.weight_version = events, "default"
    await worker.ready(inference.address)
    await worker.issue(WELL[0])
    await asyncio.wait_for(left.wait(), 120)
    await until(lambda: inference.info_asked >= 3, "the server is asked again and again what weights it has")

    assert len(inference.asked) == 1
    inference.weight_version = KEY
    await until(lambda: WELL[0] in worker.results, "the result")
    assert len(worker.results[WELL[0]].segments[0].tokens) == 5 + 200
    assert worker.context.vitals["mislabelled_tokens"] == worker.results[WELL[0]].discarded == 16
    assert "mislabelled_at_s" in worker.context.vitals


async def test_passes_of_a_server_that_drafts_are_summed_over_the_requests_of_a_trajectory(
    inference: LikeSGLang, begin: Any
):
    worker = await begin(max_new_tokens=200)

    async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        first, tokens = len(inference.asked) == 1, asked.tokens()
        yield inference.answer(asked, tokens[:16], None, spec_verify_ct=8)
        yield inference.answer(
            asked, tokens[16:40] if first else tokens[16:], "abort" if first else "length", spec_verify_ct=20
        )

    inference.events = events
    await worker.ready(inference.address)
    await worker.issue(WELL[0])
    await until(lambda: WELL[0] in worker.results, "the result")

    result = worker.results[WELL[0]]
    assert (result.verified, result.passes) == (40 + 160, 20 + 20)


async def test_a_server_that_labels_otherwise_than_it_announces_is_asked_a_few_times(inference: LikeSGLang, begin: Any):
    worker = await begin()

    async def serve(asked: Asked) -> dict[str, Any]:
        return inference.answer(asked, asked.tokens(), weight_version="default")

    inference.serve = serve
    await worker.ready(inference.address)
    await worker.issue(WELL[0])

    await until(lambda: WELL[0] in worker.failures, "the claim of failure")
    assert "sampled with weights 'default', expected '0:0:made'" in worker.failures[WELL[0]].detail
    assert len(inference.asked) == 4
    assert worker.failures[WELL[0]].tokens == 4 * 8


async def test_a_request_that_an_update_overtook_is_no_reason_to_doubt_the_engine(inference: LikeSGLang, begin: Any):
    worker = await begin()

    async def serve(asked: Asked) -> dict[str, Any]:
        if len(inference.asked) == 1:
            inference.weight_version = "0:1:next"
            await worker.updating()
            await worker.ready(inference.address, "0:1:next")
            await until(lambda: newest(worker) == "0:1:next", "the worker knows of the update")
        return await inference.whole(asked)

    def newest(worker: Worker) -> str:
        engine = worker.worker.tools.fleet._engines["engine-1"]
        return engine.ready.key if engine.ready is not None else ""

    inference.serve = serve
    await worker.ready(inference.address)
    await worker.issue(WELL[0])

    await until(lambda: WELL[0] in worker.results, "the result")
    assert [span.version for span in worker.results[WELL[0]].versions] == [1]
    assert "mislabelled_at_s" not in worker.context.vitals
    assert inference.info_asked == 0


@pytest.mark.parametrize("leaves", [True, False])
async def test_what_is_under_way_on_an_engine_that_left_goes_on_elsewhere(
    inference: LikeSGLang, begin: Any, leaves: bool
):
    worker = await begin()
    async with like_sglang() as frozen:
        frozen.weight_version = KEY

        async def never(asked: Asked) -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        frozen.serve = never
        await worker.ready(frozen.address)
        await worker.issue(WELL[0])
        await until(lambda: len(frozen.asked) == 1, "the request is under way")
        if leaves:
            await worker.gone()
            await worker.ready(inference.address, engine="engine-2")
        else:
            await worker.ready(inference.address)  # another start, at another address

        await until(lambda: WELL[0] in worker.results, "the result")


async def test_a_token_outside_of_the_vocabulary_is_sent_to_no_server(inference: LikeSGLang, begin: Any):
    async def far(row: PromptRow, context: Any) -> None:
        await context.generate([5, 99_999])

    worker = await begin()
    worker.worker.tools.functions["task"] = far
    await worker.ready(inference.address)
    await worker.issue(WELL[0])

    await until(lambda: WELL[0] in worker.failures, "the claim of failure")
    assert "token id 99999, outside of the vocabulary of 42" in worker.failures[WELL[0]].detail
    assert not inference.asked


async def test_a_conversation_that_reaches_the_context_is_truncated_and_not_refused(inference: LikeSGLang, begin: Any):
    finishes: list[tuple[str, int]] = []

    async def talk(row: PromptRow, context: Any) -> None:
        tokens = context.tokenizer.encode_prompt(row, max_tokens=None).tolist()
        while not finishes or finishes[-1][1]:
            answer = await context.generate(tokens, max_new_tokens=200)
            finishes.append((answer.finish, len(answer.tokens)))
            tokens += [*answer.tokens.tolist(), 5, 6, 7]

    worker = await begin()
    worker.worker.tools.functions["task"] = talk
    await worker.ready(inference.address)
    await worker.issue(WELL[0], prompt="^abc=")

    await until(lambda: WELL[0] in worker.results or bool(worker.failures), "its end")
    assert not worker.failures
    assert finishes == [("length", 200), ("length", 200), ("length", 512 - 5 - 2 * 203), ("length", 0)]
    result = worker.results[WELL[0]]
    assert result.truncated
    assert result.segments[0].mask.sum() == 512 - 5 - 6
