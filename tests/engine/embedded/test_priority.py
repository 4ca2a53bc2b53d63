"""A full engine: requests of higher priority take rows of others, which go on later and lose nothing."""

import pytest

from asyncrl.engine.embedded.request import Request, Sampling
from asyncrl.engine.embedded.scheduler import Engine
from benchmarks.engine import save_random_model

VOCAB, ROWS, PROMPT = 64, 4, [3, 5, 8, 13]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_random_model(directory, vocab=VOCAB, hidden=32, layers=2)
    return directory


def ask(rid: str, *, priority: int = 0, tokens: int = 40, seed: int = 1, young: int = 0) -> Request:
    sampling = Sampling(max_new_tokens=tokens, sampling_seed=seed, ignore_eos=not young, min_new_tokens=young)
    request = Request(rid, [*PROMPT, seed], sampling)
    request.priority = priority
    return request


def run_alone(model, request: Request) -> Request:
    engine = Engine(model, max_running=1, context_length=128)
    engine.submit(request)
    while engine.runnable:
        engine.step()
    return request


def full(model, **how: int) -> tuple[Engine, list[Request]]:
    """An engine whose rows are all taken by requests that have five tokens each."""
    engine = Engine(model, max_running=ROWS, context_length=128)
    requests = [ask(f"rollout-{number}", seed=number, **how) for number in range(ROWS)]
    for request in requests:
        engine.submit(request)
    while any(len(request.tokens) < 5 for request in requests):
        engine.step()
    return engine, requests


def test_an_urgent_request_begins_with_the_next_step_of_a_full_engine_and_nothing_is_lost(model):
    engine, rollouts = full(model)
    had = [list(request.tokens) for request in rollouts]
    live = ask("live", priority=100, seed=9, tokens=6)
    engine.submit(live)
    engine.step()

    assert len(live.tokens) == 1
    assert sorted(request.retractions for request in rollouts) == [0, 0, 0, 1]
    [gave] = [request for request in rollouts if request.retractions]
    assert gave.row == -1 and gave.tokens == had[rollouts.index(gave)]
    while engine.runnable:
        engine.step()
    for request in (*rollouts, live):
        alone = run_alone(model, ask("alone", seed=request.sampling.sampling_seed, tokens=request.limit))
        assert request.tokens == alone.tokens
        assert request.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_as_many_give_way_as_are_urgent_and_none_of_equal_priority(model):
    engine, rollouts = full(model)
    urgent = [ask(f"live-{number}", priority=100, seed=20 + number) for number in range(ROWS + 2)]
    for request in (*urgent, ask("another", seed=50)):
        engine.submit(request)
    engine.step()
    assert [len(request.tokens) for request in urgent] == [1] * ROWS + [0, 0]
    engine.step()
    assert [request.retractions for request in rollouts] == [1] * ROWS
    assert not any(request.retractions for request in urgent)
    order = [request.rid for request in engine.waiting]
    assert order[:2] == ["live-4", "live-5"]
    assert order[-1] == "another", "what had a row goes on before what never had one"
    while engine.runnable:
        engine.step()
    assert all(request.finish is not None and request.finish.type == "length" for request in (*urgent, *rollouts))


def test_a_free_row_is_taken_before_anybody_gives_way(model):
    engine, rollouts = full(model)
    engine.abort(rollouts[0].rid)
    live = ask("live", priority=100, seed=9)
    engine.submit(live)
    engine.step()

    assert len(live.tokens) == 1
    assert not any(request.retractions for request in rollouts)


def test_one_that_may_not_stop_yet_keeps_that_without_a_row(model):
    engine, rollouts = full(model, young=20)
    for number in range(2):
        engine.submit(ask(f"live-{number}", priority=100, seed=20 + number, tokens=3))
    while engine.runnable:
        engine.step()

    assert sum(request.retractions for request in rollouts) == 2
    assert all(len(request.tokens) >= 20 for request in rollouts)


def test_what_gave_way_comes_back_with_its_tokens_when_all_is_ended(model):
    engine, rollouts = full(model)
    engine.submit(ask("live", priority=100, seed=9))
    engine.step()
    [gave] = [request for request in rollouts if request.retractions]
    had = list(gave.tokens)
    engine.pause("abort")

    assert gave.finish is not None and gave.finish.type == "abort"
    assert gave.tokens == had
    assert len(gave.logprobs) == len(had)
    assert [(span.start, span.end) for span in gave.spans] == [(0, len(had))]
