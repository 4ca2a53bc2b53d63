import asyncio
import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from asyncrl.engine.embedded.request import Request, Sampling, Span
from asyncrl.engine.embedded.scheduler import Engine
from asyncrl.engine.errors import EngineError, EngineRefused
from benchmarks.engine import save_random_model

VOCAB = 64
PROMPT = [(3 * i) % VOCAB for i in range(40)]


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Two directories with different weights of one shape."""
    torch.set_num_threads(1)
    directories = []
    for seed in (0, 1):
        directory = tmp_path_factory.mktemp(f"weights{seed}")
        model = save_random_model(directory, vocab=VOCAB, hidden=32, layers=2)
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(directory)
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        words.save(str(directory / "tokenizer.json"))
        directories.append(directory)
    return directories


@pytest.fixture
def engine(versions):
    engine = Engine(versions[0], max_running=4, context_length=128)
    engine.weight_version = "0"
    return engine


def ask(rid="a", prompt=PROMPT, listener=None, streaming=False, extra_key=None, **sampling):
    return Request(rid, list(prompt), Sampling(**sampling), listener=listener, streaming=streaming, extra_key=extra_key)


def submit(engine, *requests):
    for request in requests:
        engine.submit(request)
    return requests


def finish(engine, *requests):
    submit(engine, *requests)
    while engine.runnable:
        engine.step()
    return requests[0]


def steps(engine, count):
    for _ in range(count):
        engine.step()


@contextlib.asynccontextmanager
async def stepping(engine):
    task = asyncio.create_task(engine.run())
    yield
    task.cancel()


def test_a_seeded_request_gets_the_same_tokens_in_any_company(versions):
    alone = finish(Engine(versions[0], max_running=1, context_length=128), ask(sampling_seed=11, max_new_tokens=20))

    crowd = Engine(versions[0], max_running=4, context_length=128, seed=5)
    submit(crowd, *(ask(f"x{i}", [i + 1, 2], max_new_tokens=7 + i, temperature=0.5 + i) for i in range(6)))
    steps(crowd, 3)
    among = finish(crowd, ask(sampling_seed=11, max_new_tokens=20))

    assert among.tokens == alone.tokens
    assert finish(crowd, ask("b", sampling_seed=12, max_new_tokens=20)).tokens != alone.tokens


def test_unseeded_requests_differ_and_the_engine_seed_repeats_them(versions):
    def sample():
        engine = Engine(versions[0], max_running=2, context_length=128, seed=3)
        requests = submit(engine, ask("a", max_new_tokens=16), ask("b", max_new_tokens=16))
        finish(engine, ask("c", max_new_tokens=1))
        return [request.tokens for request in requests]

    first, second = sample()
    assert first != second
    assert sample() == [first, second]


def test_a_stop_id_ends_the_generation_and_is_its_last_token(engine):
    free = finish(engine, ask(max_new_tokens=20, sampling_seed=1))
    stop = free.tokens[7]

    stopped = finish(engine, ask(max_new_tokens=20, sampling_seed=1, stop_token_ids=(stop,)))

    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert (stopped.finish.type, stopped.finish.matched) == ("stop", stop)


def test_the_models_end_token_stops_unless_ignored(versions, tmp_path):
    free = finish(Engine(versions[0], max_running=1), ask(max_new_tokens=20, sampling_seed=1))
    shutil.copytree(versions[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": free.tokens[5]}))
    engine = Engine(tmp_path, max_running=1)

    stopped = finish(engine, ask(max_new_tokens=20, sampling_seed=1))
    ignoring = finish(engine, ask(max_new_tokens=20, sampling_seed=1, ignore_eos=True))

    assert stopped.finish.matched == free.tokens[5]
    assert ignoring.tokens == free.tokens


def test_a_stop_string_ends_the_generation_where_the_text_has_it(engine):
    free = finish(engine, ask(max_new_tokens=20, sampling_seed=1))
    text = f"w{free.tokens[8]} w{free.tokens[9]}"

    stopped = finish(engine, ask(max_new_tokens=20, sampling_seed=1, stop=("never", text)))

    assert stopped.tokens == free.tokens[:10]
    assert stopped.finish.matched == text


def test_min_new_tokens_puts_the_stop_off_and_its_probability_to_zero(engine):
    every = tuple(token for token in range(VOCAB) if token != 3)

    request = finish(engine, ask(max_new_tokens=9, min_new_tokens=4, stop_token_ids=every, sampling_seed=1))

    assert request.tokens[:4] == [3, 3, 3, 3]
    assert request.logprobs[:4] == pytest.approx([0.0] * 4)
    assert (request.finish.type, len(request.tokens)) == ("stop", 5)


def test_a_generation_never_outgrows_the_context(engine):
    request = finish(engine, ask())

    assert len(request.prompt) + len(request.tokens) == 128
    assert (request.finish.type, request.finish.length) == ("length", 88)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "input_ids is empty"),
        ({"prompt": [VOCAB]}, "token id 64 is outside the vocabulary of 64"),
        ({"prompt": [1, -1]}, "token id -1"),
        ({"prompt": [1] * 128}, r"The input \(128 tokens\) is longer than the model's context length \(128 tokens\)"),
        ({"max_new_tokens": 89}, "maximum context length of 128 tokens. You requested a total of 129 tokens: 40 "),
        ({"stop_token_ids": (99,)}, "stop id 99"),
        ({"rid": "taken"}, "Duplicate request ID"),
    ],
)
def test_what_can_never_run_is_refused_when_it_arrives(engine, changes, message):
    submit(engine, ask("taken"))

    with pytest.raises(EngineRefused, match=message):
        engine.submit(ask(**{"rid": "b", **changes}))


def test_requests_beyond_the_slots_wait_in_order(engine):
    requests = [ask(str(i), [i + 1, 2], max_new_tokens=3) for i in range(9)]

    finish(engine, *requests)

    admitted = [request.admitted_s for request in requests]
    assert admitted == sorted(admitted)
    assert len(set(admitted)) == 3


def test_equal_prompts_are_computed_once_and_their_count_is_reported(engine):
    requests = submit(engine, *(ask(str(i), max_new_tokens=30, sampling_seed=i) for i in range(4)))
    steps(engine, 2)

    assert [request.cached_tokens for request in requests] == [0, 39, 39, 39]


def test_a_longer_prompt_reuses_the_whole_blocks_of_an_earlier_conversation(engine, versions):
    first = finish(engine, ask(max_new_tokens=20, sampling_seed=1))
    turn = [*PROMPT, *first.tokens, 7, 8, 9]

    second = finish(engine, ask("b", turn, max_new_tokens=8, sampling_seed=2))

    fresh = finish(Engine(versions[0], max_running=1), ask("b", turn, max_new_tokens=8, sampling_seed=2))
    assert second.cached_tokens == 48  # 59 tokens were fed; blocks have 16
    assert fresh.cached_tokens == 0
    assert second.tokens == fresh.tokens
    assert second.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)


def test_different_extra_keys_share_nothing(engine):
    finish(engine, ask(max_new_tokens=2, extra_key="1"))

    assert finish(engine, ask("b", max_new_tokens=2, extra_key="2")).cached_tokens == 0
    assert finish(engine, ask("c", max_new_tokens=2, extra_key="2")).cached_tokens == 32
    assert finish(engine, ask("d", max_new_tokens=2)).cached_tokens == 0


def test_a_flush_forgets_and_is_refused_while_requests_run(engine):
    finish(engine, ask(max_new_tokens=2))
    submit(engine, ask("b", max_new_tokens=2))
    assert not engine.flush_cache()
    finish(engine, ask("c", max_new_tokens=2))

    assert engine.flush_cache()
    assert finish(engine, ask("d", max_new_tokens=2)).cached_tokens == 0


def test_the_cache_drops_what_was_used_longest_ago_and_stays_right(versions):
    engine = Engine(versions[0], max_running=1, context_length=64)  # keeps four blocks
    prompts = [[i, *PROMPT[:20]] for i in range(6)]
    before = [finish(engine, ask("a", prompt, max_new_tokens=4, sampling_seed=1)).tokens for prompt in prompts]

    repeated = [finish(engine, ask("a", prompt, max_new_tokens=4, sampling_seed=1)) for prompt in prompts]

    assert [request.tokens for request in repeated] == before
    assert repeated[0].cached_tokens == 0
    assert finish(engine, ask("a", prompts[5], max_new_tokens=4)).cached_tokens == 16
    assert len(engine.cache) <= 64


def test_an_abort_returns_the_partial_answer_and_an_unknown_id_is_no_fault(engine):
    running, other, *_ = submit(engine, *(ask(str(i), max_new_tokens=50) for i in range(4)))
    (queued,) = submit(engine, ask("queued"))
    steps(engine, 5)

    for rid in ("0", "queued", "nobody"):
        engine.abort(rid)

    assert running.finish.type == queued.finish.type == "abort"
    assert len(running.tokens) == len(running.logprobs) == 5
    assert queued.tokens == []
    before = len(other.tokens)
    engine.step()
    assert len(other.tokens) == before + 1


def test_pause_abort_ends_everything_and_later_requests_wait_for_continue(engine):
    (running,) = submit(engine, ask(max_new_tokens=50))
    steps(engine, 3)

    engine.pause("abort")
    (later,) = submit(engine, ask("b", max_new_tokens=2))

    assert running.finish.type == "abort" and len(running.tokens) == 3
    assert not engine.runnable
    engine.resume()
    finish(engine, ask("c", max_new_tokens=1))
    assert later.finish.type == "length"


async def test_in_place_swaps_weights_under_running_requests_with_exact_spans(engine, versions):
    (request,) = submit(engine, ask(max_new_tokens=10))
    steps(engine, 4)

    engine.pause("in_place")
    with pytest.raises(EngineRefused, match="send flush_cache false"):
        await engine.update_weights(versions[1], "1", flush=True)
    await engine.update_weights(versions[1], "1", flush=False)
    engine.resume()
    steps(engine, 6)

    assert request.spans == [Span("0", 0, 4), Span("1", 4, 10)]
    assert finish(engine, ask("b", max_new_tokens=1)).cached_tokens == 0  # a hybrid's keys and values are not kept


async def test_retract_computes_the_prefix_again_under_the_new_weights(engine, versions):
    (request,) = submit(engine, ask(max_new_tokens=12, sampling_seed=4))
    steps(engine, 5)

    engine.pause("retract")
    await engine.update_weights(versions[1], "1", flush=True)
    engine.resume()
    steps(engine, 7)

    assert request.spans == [Span("0", 0, 5), Span("1", 5, 12)]
    assert request.retractions == 1
    resumed = ask(prompt=PROMPT + request.tokens[:5], max_new_tokens=7, sampling_seed=4)
    exact = finish(Engine(versions[1], max_running=1), resumed)
    assert request.tokens[5:] == exact.tokens
    assert request.logprobs[5:] == pytest.approx(exact.logprobs, abs=1e-4)


async def test_an_update_of_a_running_engine_lets_running_requests_end_and_holds_new_ones(engine, versions):
    (request,) = submit(engine, ask(max_new_tokens=30))
    async with stepping(engine):
        await asyncio.sleep(0)
        update = asyncio.create_task(engine.update_weights(versions[1], "1", flush=True))
        await asyncio.sleep(0)
        (later,) = submit(engine, ask("b", max_new_tokens=3))
        await update
        while later.finish is None:
            await engine.changed.wait()

    assert request.spans == [Span("0", 0, 30)]
    assert later.spans == [Span("1", 0, 3)]


@pytest.mark.parametrize("most", [0, 2**20])  # bytes that are read between steps; others are read on a thread
async def test_weights_that_were_read_ahead_are_only_swapped(engine, versions, tmp_path, monkeypatch, most):
    monkeypatch.setattr("asyncrl.engine.embedded.weights._PARTED_BYTES", most)
    copied = Path(shutil.copytree(versions[1], tmp_path / "copied"))
    (request,) = submit(engine, ask(max_new_tokens=30))
    steps = asyncio.create_task(engine.run())
    await engine.ahead.read(copied)
    assert request.tokens and (most == 0 or len(request.tokens) < 30)  # it went on meanwhile
    shutil.rmtree(copied)
    await engine.update_weights(copied, "1", flush=True)
    steps.cancel()

    wanted = finish(Engine(versions[1], max_running=1), ask(max_new_tokens=8, sampling_seed=1))
    assert finish(engine, ask(max_new_tokens=8, sampling_seed=1)).tokens == wanted.tokens
    with pytest.raises(EngineError):  # once
        await engine.update_weights(copied, "1", flush=True)


async def test_a_failed_update_keeps_the_old_weights(engine, versions, tmp_path):
    before = finish(engine, ask(max_new_tokens=8, sampling_seed=1)).tokens
    save_random_model(tmp_path, vocab=VOCAB, hidden=64, layers=2)

    for directory in (tmp_path, tmp_path / "absent"):
        await engine.ahead.read(directory)
        with pytest.raises(EngineError):
            await engine.update_weights(directory, "1", flush=True)

    assert engine.weight_version == "0"
    assert finish(engine, ask(max_new_tokens=8, sampling_seed=1)).tokens == before


async def test_weights_that_are_not_finite_are_refused(engine, versions, tmp_path):
    model = save_random_model(tmp_path, vocab=VOCAB, hidden=32, layers=2)
    model.model.norm.weight.data[0] = torch.nan
    model.save_pretrained(tmp_path)

    with pytest.raises(EngineError, match=r"model\.norm\.weight holds values that are not finite"):
        await engine.update_weights(tmp_path, "1", flush=True)


def test_a_stream_gets_the_first_token_at_once_then_those_of_its_interval_and_the_end(engine):
    seen = []
    finish(
        engine,
        ask(max_new_tokens=10, stream_interval=4, streaming=True, listener=lambda it: seen.append(len(it.tokens))),
    )

    assert seen == [1, 5, 9, 10]


async def test_a_stream_gets_the_tokens_before_an_update_by_themselves(engine, versions):
    seen = []
    submit(
        engine,
        ask(max_new_tokens=8, stream_interval=8, streaming=True, listener=lambda it: seen.append(len(it.tokens))),
    )
    steps(engine, 3)
    engine.pause("in_place")
    await engine.update_weights(versions[1], "1", flush=False)

    assert seen == [3]


async def test_an_idle_engine_sleeps_until_a_request_comes(engine):
    ended = asyncio.Event()
    async with stepping(engine):
        await asyncio.sleep(0)
        assert not engine.runnable
        submit(engine, ask(max_new_tokens=3, listener=lambda _: ended.set()))
        async with asyncio.timeout(120):
            await ended.wait()


def test_logits_that_are_not_finite_end_the_engine_with_the_version_and_the_layer(engine):
    first = engine.model.weights.layers[0]
    engine.model.weights.layers[0] = first._replace(out=lambda x: torch.full((len(x), 32), torch.nan))

    with pytest.raises(
        EngineError, match=r"weights 0: logits are not finite, from layer 1 of 2 on; .* lower learner.lr"
    ):
        finish(engine, ask(max_new_tokens=4))
