"""One generation on engines, disturbed wherever it can be: it ends as an undisturbed one does. No bus is there."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from asyncrl.data.model_dir import ModelInfo
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.answer import Generation
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.errors import EngineRefused, EngineUnavailable, RequestFailed, VersionAbsent
from asyncrl.engine.fleet import Fleet, Wanted
from asyncrl.engine.generator import TRIES, Generator, Watch
from asyncrl.engine.request_options import Pace, RequestOptions
from benchmarks.engine import served
from harness.models import make_endless_model
from harness.scripted_servers import CONTEXT, KEY, Servers, failing, never, ready, some
from harness.stage import until
from topics.engines import EngineGone, EngineUpdating
from topics.trajectories import Answer
from topics.weights import WeightsRefused

PROMPT = "^abcdef="


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_endless_model(directory)
    return directory


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    """A server for all tests of this file."""
    loop = asyncio.new_event_loop()
    stack = contextlib.AsyncExitStack()
    yield loop.run_until_complete(stack.enter_async_context(served(model, "--weight-version", KEY)))
    loop.run_until_complete(stack.aclose())
    loop.close()


class Wasteful(Watch):
    """Counts what belongs to no answer."""

    wasted = 0

    def on_tokens(self, tokens: int, discarded: int, lineage: int) -> None:
        self.wasted += discarded


class Sampling:
    """Answers to one prompt on one engine."""

    def __init__(self, fleet: Fleet, model: Path) -> None:
        self.watch = Wasteful()
        self.tokenizer = TaskTokenizer.load(model)
        shape = ModelInfo("any", 64, CONTEXT)
        self.generator = Generator(fleet, shape, self.tokenizer.decode_all, counts={})

    async def extend(
        self, answer: Answer, *, most: int = 60, stop: tuple[str, ...] = (), prompt: str = PROMPT
    ) -> Answer:
        sampling = SamplingParams(most, temperature=0.0, stop=list(stop))
        ids = self.tokenizer.encode(prompt)
        return await self.generator.generate(ids, sampling, answer=answer, watch=self.watch)


@pytest.fixture
async def sampling(model: Path, address: str) -> AsyncIterator[Sampling]:
    fleet = Fleet(lambda _, address: EngineClient(address), counts={}, fail=never)
    fleet.apply(ready(address))
    yield Sampling(fleet, model)
    await fleet.close()


def cut(answer: Answer, tokens: int) -> Answer:
    """Return the progress of an answer after so many tokens."""
    part = slice(0, tokens)
    return Answer(
        "generate",
        "",
        done=False,
        tokens=answer.tokens[part].copy(),
        logprobs=answer.logprobs[part].copy(),
        versions=answer.versions[part].copy(),
    )


def stop_inside(text: str, length: int) -> tuple[str, int]:
    """A piece of a text that is there once up to its end, and where it ends."""
    for end in range(length + 4, len(text)):
        piece = text[end - length : end]
        if text.find(piece) == end - length:
            return piece, end
    pytest.fail(f"no piece of {length} letters is new in {text!r}")


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_stop_string_is_found_across_every_resumption(sampling: Sampling, streamed: bool):
    sampling.generator.quiet_tokens = 0 if streamed else 1000
    sampling.generator.pace = Pace(RequestOptions(5 if streamed else 16))
    free = await sampling.extend(Answer("generate", "", done=False))
    stop, end = stop_inside(sampling.tokenizer.decode_all(free.tokens.tolist()), 4)
    undisturbed = await sampling.extend(Answer("generate", "", done=False), stop=("never", stop))
    assert (len(undisturbed.tokens), undisturbed.finish) == (end, "stop")
    assert free.tokens[:end].tolist() == undisturbed.tokens.tolist()

    for known in range(1, end):
        resumed = await sampling.extend(cut(undisturbed, known), stop=("never", stop))

        assert resumed.tokens.tolist() == undisturbed.tokens.tolist(), f"cut after {known} of {end} tokens"
        assert (resumed.finish, len(resumed.versions)) == ("stop", end)
        np.testing.assert_allclose(resumed.logprobs, undisturbed.logprobs, atol=1e-4)
    assert sampling.watch.wasted > 0  # the engine went on past a stop string that began before its request


async def test_what_would_exceed_the_context_ends_there_as_length(sampling: Sampling):
    whole = await sampling.extend(Answer("generate", "", done=False), most=500)
    resumed = await sampling.extend(cut(whole, 50), most=500)
    full = await sampling.extend(cut(whole, CONTEXT - len(PROMPT)), most=500)

    assert (len(whole.tokens), whole.finish) == (CONTEXT - len(PROMPT), "length")
    assert resumed.tokens.tolist() == full.tokens.tolist() == whole.tokens.tolist()
    assert resumed.finish == full.finish == "length"
    with pytest.raises(EngineRefused, match="the prompt has 128 tokens; a context of 128 takes 1 to 127"):
        await sampling.extend(Answer("generate", "", done=False), prompt="a" * CONTEXT)


@pytest.mark.parametrize("most", [20, 100])  # answered at once, and streamed
async def test_an_update_in_the_middle_is_continued_from_what_came_with_the_version_of_each_token(most: int):
    servers = Servers()
    one = servers.start("one")

    def update() -> Generation:
        servers.fleet.apply(EngineUpdating("one", 0, 1))
        asyncio.get_running_loop().call_soon(servers.start, "one", 1)
        return some(7, finish="abort")

    one.answers = [update]
    answer = await servers.generate(most)

    assert (answer.done, answer.finish, len(answer.tokens)) == (True, "length", most)
    assert answer.versions.tolist() == [0] * 7 + [1] * (most - 7)
    assert one.asked[1] == ([*servers.ids.tolist(), *answer.tokens[:7].tolist()], most - 7, "0:1:made")


async def test_a_dead_engine_is_left_for_another_and_used_again_once_it_is_well():
    servers = Servers()
    one = servers.start("one")
    one.well = False
    one.answers = [failing(EngineUnavailable("one", "gone"))]
    pending = asyncio.create_task(servers.generate())
    await until(lambda: bool(one.asked), "the first engine is asked")
    two = servers.start("two")

    assert len((await pending).tokens) == 20
    assert len(two.asked) == 1
    assert servers.counts["engine_unavailable"] == 1
    servers.fleet.apply(EngineGone("two", "stopped"))
    one.well = True
    assert len((await servers.generate()).tokens) == 20
    assert len(one.asked) == 2


async def test_tokens_of_other_weights_than_asked_for_are_in_no_answer():
    servers = Servers()
    one = servers.start("one")
    one.answers = [lambda: some(20, "0:9:other")]
    two = servers.start("two", 1)
    one_first = await servers.generate()

    assert one_first.versions.tolist() == [1] * 20
    assert (len(one.asked), len(two.asked)) == (1, 1)
    assert servers.counts["mislabelled_tokens"] == 20


@pytest.mark.parametrize("known", [True, False])  # the news of an update is faster than the answer, or slower
async def test_a_request_that_is_late_for_one_update_after_another_has_not_failed(known: bool):
    servers, version, many = Servers(), 0, TRIES
    one = servers.start("one")

    def late() -> Generation:
        """The server sampled with the next weights, and has the ones after that by now."""
        nonlocal version
        label, version = f"0:{version + 1}:made", version + 2
        if known:
            servers.start("one", version)
        else:
            asyncio.get_running_loop().call_later(0.01, servers.start, "one", version)
        return some(20, label)

    one.answers = [late] * many
    answer = await servers.generate()

    assert answer.versions.tolist() == [2 * many] * 20
    assert [key for _, _, key in one.asked] == [f"0:{2 * count}:made" for count in range(many + 1)]
    assert "mislabelled_at_s" not in servers.counts


async def test_requests_that_fail_again_and_again_are_given_up_and_the_next_is_tried():
    servers = Servers()
    one = servers.start("one")
    one.answers = [failing(RequestFailed("no luck"))] * (TRIES + 1)

    with pytest.raises(EngineRefused, match=f"{TRIES} requests failed without a token between them.*no luck"):
        await servers.generate()
    assert len(one.asked) == TRIES

    one.answers = [failing(RequestFailed("no luck"))] * (TRIES - 1)
    assert len((await servers.generate()).tokens) == 20


async def test_the_least_loaded_engine_with_the_version_is_chosen_and_exactly_it_where_asked():
    servers = Servers()
    for address, version in (("one", 0), ("two", 1), ("three", 2)):
        servers.start(address, version)

    found = [(await servers.fleet.choose(Wanted(1))).engine_id for _ in range(4)]
    exact = (await servers.fleet.choose(Wanted(1, exact=True))).engine_id
    assert sorted(found) == ["three", "three", "two", "two"]
    assert exact == "two"
    assert (await servers.generate(wanted=Wanted(0, exact=True))).versions.tolist() == [0] * 20

    servers.start("one", 2)
    with pytest.raises(VersionAbsent, match="no engine has version 0 now; the oldest that is ready is 1"):
        await servers.generate(wanted=Wanted(0, exact=True))


async def test_a_version_whose_bytes_every_engine_refused_is_not_waited_for():
    servers = Servers()
    for address in ("one", "two"):
        servers.start(address, 0)
    waiting = asyncio.create_task(servers.fleet.choose(Wanted(3, exact=True)))
    servers.fleet.refuse(WeightsRefused("one", 0, 3, 9, "its folder is gone"))
    await asyncio.sleep(0)
    servers.start("one", 0)
    assert not waiting.done()  # the other one may have it
    servers.fleet.refuse(WeightsRefused("two", 0, 3, 9, "its folder is gone"))

    with pytest.raises(VersionAbsent, match="one could not take version 3: its folder is gone"):
        await waiting
    servers.start("two", 3)
    assert (await servers.fleet.choose(Wanted(3, exact=True))).engine_id == "two"


async def test_members_of_a_group_go_to_one_engine_and_groups_spread_over_all():
    servers, mirror = Servers(), Servers()
    for address in ("one", "two", "three", "four"):
        servers.start(address)
        mirror.start(address)
    groups = [f"p{number:06d}" for number in range(16)]
    slots = [(group, await servers.fleet.choose(Wanted(group=group))) for group in groups for _ in range(4)]
    places = {group: {engine.engine_id for name, engine in slots if name == group} for group in groups}

    assert sum(len(found) == 1 for found in places.values()) >= len(groups) // 2  # others overflow where it is crowded
    loads = [sum(engine.engine_id == name for _, engine in slots) for name in ("one", "two", "three", "four")]
    assert max(loads) <= 1.25 * 64 / 4 + 1
    for group in groups[:1]:  # another process finds the same engine
        assert {(await mirror.fleet.choose(Wanted(group=group))).engine_id} == places[group]

    for _, engine in slots:
        servers.fleet.release(engine)
    home = (await servers.fleet.choose(Wanted(group="p000000"))).engine_id
    servers.fleet.apply(EngineGone(home, "stopped"))
    moved = {(await servers.fleet.choose(Wanted(group="p000000"))).engine_id for _ in range(3)}
    assert len(moved) == 1
    assert moved != {home}


async def test_a_request_that_failed_goes_to_another_engine_of_its_group():
    servers = Servers()
    one, two = servers.start("one"), servers.start("two")
    first = one if (await servers.fleet.choose(Wanted(group="p000001"))).engine_id == "one" else two
    other = two if first is one else one
    first.answers = [failing(RequestFailed("a fault of this one"))] * 3

    assert len((await servers.generate(wanted=Wanted(group="p000001"))).tokens) == 20
    assert (len(first.asked), len(other.asked)) == (1, 1)


async def test_a_prefix_is_cached_under_a_key_of_its_own_each_time_the_weights_were_loaded():
    servers = Servers()
    one = servers.start("one")
    one.answers = [lambda: some(20)]
    servers.fleet.apply(msgspec.structs.replace(ready("one", engine="one"), cache="ab12"))

    assert (await servers.generate()).versions.tolist() == [0] * 20
    assert one.asked[0][2] == "0:0:made:ab12"


async def test_a_generation_waits_for_a_version_and_for_a_slot():
    servers = Servers()
    servers.start("one")
    pending = asyncio.create_task(servers.generate(wanted=Wanted(3)))
    await asyncio.sleep(0.01)
    assert not pending.done()
    servers.fleet.apply(ready("one", 3, engine="one", slots=1))
    assert (await pending).versions.tolist() == [3] * 20

    engine = await servers.fleet.choose(Wanted())
    pending = asyncio.create_task(servers.generate())
    await asyncio.sleep(0.01)
    assert not pending.done()
    servers.fleet.release(engine)
    assert len((await pending).tokens) == 20
