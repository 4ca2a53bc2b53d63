"""Routing replay from the engine to the trainer: tokens, their experts, and the gap between the two probabilities."""

import asyncio
import dataclasses
import re
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
import torch
import xxhash

from actors.learner.fetching import fetch_trajectories
from asyncrl.algorithms.batches import build_rows
from asyncrl.bus.publish import publish
from asyncrl.bus.routing import Cut, store_routing
from asyncrl.data.model_dir import ModelInfo, check_model_directory
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.answer import Generation, VersionSpan
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.embedded.scheduler import Engine
from asyncrl.engine.embedded.server import EngineServer
from asyncrl.engine.errors import EngineRefused
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.generator import Generator, Watch
from asyncrl.engine.request_options import RequestOptions
from asyncrl.engine.routing import keep_routing, rows_of
from asyncrl.rollout.context import Limits, RolloutContext
from asyncrl.rollout.journal import Journal
from asyncrl.training import replay_router
from asyncrl.training.protocol import RowError
from asyncrl.training.routing import Mixture, check_routing
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from harness.mixtures import MIXTURE, routed_rows, write_transformers_model
from harness.planted_errors import apart, unsteady
from harness.stories import result
from harness.training import policy, policy_rows
from topics.batches import BatchGroup, BatchMember, BatchPacked
from topics.engines import EngineReady
from topics.payload_refs import Experts
from topics.trajectories import Answer, Reference
from topics.wire import encode

SHAPE = ModelInfo("any", 64, 128, experts=4)
KEY, TOKENS = "0:0:made", 24
NOISE = 2.0  # added to or taken from logits that choose experts, at most


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("mixture")
    write_transformers_model(folder, "qwen3_moe", MIXTURE)
    return folder


@asynccontextmanager
async def serving(engine):
    """The address of an engine in this process."""
    server = EngineServer(engine, incremental=True, api_key=None)
    listening = await asyncio.get_running_loop().create_server(protocol := server.protocol(), "127.0.0.1", 0)
    stepping = asyncio.create_task(engine.run())
    yield "http://{}:{}".format(*listening.sockets[0].getsockname()[:2])
    stepping.cancel()
    listening.close()
    await protocol.shutdown(1.0)


def disturb(engine):
    """Let routers choose by other logits than the shares of the chosen come from: alike whenever a token is read."""
    for layer in engine.model.weights.layers:
        choose = layer.experts.choose
        layer.experts.choose = lambda logits, choose=choose: choose(logits + NOISE * torch.sin(1000 * logits))


def ended(routed, tokens=5):
    """A request that sampled some tokens, and the experts that came with it."""
    ids = np.zeros(tokens, np.int32)
    return Generation(ids, ids.astype(np.float32), [], "length", routed.astype(np.int32).ravel())


class Aborting(Watch):
    """Aborts the requests of an engine when some tokens of the first came, so that each goes on in another one."""

    def __init__(self, engine):
        self._engine, self._left = engine, 1

    def on_tokens(self, tokens, discarded, lineage):
        if self._left and tokens:
            self._left = 0
            asyncio.get_running_loop().call_soon(self._engine.abort_all)


class Host:
    """Samples as a rollout worker does."""

    def __init__(self, generator, watch):
        self._generator, self._watch = generator, watch

    async def sample(self, input_ids, answer, limits):
        sampling = SamplingParams(limits.max_new_tokens, ignore_eos=True)
        await self._generator.generate(input_ids, sampling, answer=answer, watch=self._watch)


class Noting(EngineClient):
    """Notes the tokens of each request, and the first of them whose experts it asks for."""

    def __init__(self, address, asked):
        super().__init__(address)
        self._asked = asked

    async def generate(self, input_ids, sampling, **how):
        self._asked.append((len(input_ids), sampling.routed))
        return await super().generate(input_ids, sampling, **how)


async def sampled(model, *, noise):
    """Segments of two turns each, and their experts."""
    asked = []
    engine = Engine(model, max_running=8, seed=0)
    engine.weight_version = KEY
    if noise:
        disturb(engine)
    tokenizer, found = TaskTokenizer.load(model), []
    async with serving(engine) as address:
        fleet = Fleet(lambda _, address: Noting(address, asked), counts={}, fail=lambda error: None)
        fleet.apply(EngineReady("engine-1", address, 0, 0, "made", 32))
        generator = Generator(
            fleet, check_model_directory(model), str, counts={}, manner=RequestOptions(4, routed=True)
        )
        for number in range(4):
            host, journal = Host(generator, Aborting(engine)), Journal()
            limits = Limits(TOKENS // 2, [])
            context = RolloutContext(tokenizer, journal, host, seed=number, limits=limits, tool_limit_s=1.0)
            token = journal.begin()
            first = await context.generate([3 + number, 4, 5])
            await context.generate([3 + number, 4, 5, *first.tokens, 6, 7])
            journal.end(token)
            found.append((context.segments(), context.routing()))
        await fleet.close()
    second = 3 + TOKENS // 2 + 2  # tokens of the prompt of a second turn
    assert asked[::3] == [(3, 0)] * 4 and asked[2::3] == [(second, second - 3)] * 4
    assert all(3 < tokens < second and first == tokens - 1 for tokens, first in asked[1::3])  # went on after an abort
    return found


async def batch_rows(bus, prompt_id, found):
    """Rows of a batch as a rank of the learner makes them of what a rollout worker stored."""
    members = []
    for number, (segments, routing) in enumerate(found):
        message = msgspec.structs.replace(result(f"{prompt_id}-{number}", (0, 0)), segments=segments)
        message.routing = await store_routing(bus, message, routing, Cut([0, 2, 4], 1))
        reference = Reference(await publish(bus, message), xxhash.xxh3_64_hexdigest(encode(message)), 1)
        members.append(BatchMember(message.trajectory_id, 0, reference, number % 2, 1))
    packed = BatchPacked(1, "rl", [BatchGroup(prompt_id, members)], 0)
    return build_rows(await fetch_trajectories(bus, packed), policy(), step=1, min_version=0)[0]


def gap(model, rows, *, replays):
    """Mean difference of the log-probs of sampler and trainer, in nats."""
    trainer = TorchTrainer(model, TorchSettings(replays=replays))
    trainer._check(rows)
    found = trainer._passes.column(trainer._policy, rows)
    apart = [np.abs(found[id(row)] - row.logprobs)[row.mask != 0] for row in rows]
    return float(np.concatenate(apart).mean())


async def test_a_disturbed_router_leaves_no_gap_where_its_choice_is_replayed(model, bus):
    plain = await batch_rows(bus, "p000000", await sampled(model, noise=False))
    noisy = await batch_rows(bus, "p000001", await sampled(model, noise=True))

    assert [row.unrouted for row in plain + noisy] == [0] * 8
    assert all(len(row.tokens) == 3 + TOKENS + 2 for row in plain + noisy)
    exact = gap(model, plain, replays=False)
    assert gap(model, noisy, replays=True) <= 2 * exact
    assert gap(model, noisy, replays=False) >= 10 * exact


def test_rows_that_are_lost_train_on_the_own_routing_and_are_counted(model):
    answer = Answer("generate", "", tokens=np.arange(5, dtype=np.int32))  # three of them of a worker that died
    routed = np.tile(np.array([1, 2] * 4, np.int32), (8, 1))
    keep_routing(answer, ended(routed, tokens=2), prompt=4, had=3, model=SHAPE)
    assert rows_of(answer.routing).any(1).tolist() == [True] * 3 + [False] * 3 + [True] * 2

    [row] = routed_rows(policy_rows(np.random.default_rng(1), 2)[1:], 0)
    row = dataclasses.replace(row, routing=np.zeros_like(row.routing), routed=np.zeros_like(row.routed))
    trainer = TorchTrainer(model, TorchSettings(replays=True))
    assert trainer.step([row], policy())["routed_anew"] == 1.0
    assert dataclasses.replace(row, versions=np.full_like(row.versions, -1)).unrouted == 0  # nobody sampled them


@pytest.mark.parametrize("wrong", ["width", "expert"])
def test_the_experts_of_another_model_are_refused(model, wrong):
    [row] = routed_rows(policy_rows(np.random.default_rng(1), 2)[1:], 0)
    if wrong == "expert":
        row.routing[0, 0] = 7
    row = dataclasses.replace(row, routing=row.routing[:, :6] if wrong == "width" else row.routing)

    words = (
        "routed to expert 7, expected 0 to 3" if wrong == "expert" else r"6\] tokens and bytes of each, expected .*8"
    )
    with pytest.raises(RowError, match=f"{words}.*; engines serve another model than is trained: restart them"):
        TorchTrainer(model, TorchSettings(replays=True)).step([row], policy())


def test_a_token_whose_experts_of_one_layer_are_missing_is_refused(model):
    [row] = routed_rows(policy_rows(np.random.default_rng(1), 2)[1:], 0)
    token = int(row.routing.any(1).nonzero()[0][0])
    row.routing.reshape(len(row.tokens), 4, 2)[:, 2] = 0

    with pytest.raises(RowError, match=f"token {token} names no experts of layer 2, and those of others"):
        TorchTrainer(model, TorchSettings(replays=True)).step([row], policy())


@pytest.mark.parametrize("experts", [4, 257])  # one byte each, and two
def test_a_token_that_names_an_expert_twice_is_refused(experts):
    [row] = routed_rows(policy_rows(np.random.default_rng(1), 2)[1:], 0, experts, 3)
    if experts > 256:
        row = dataclasses.replace(row, routing=row.routing.astype(np.uint16).view(np.uint8))
    mixture = Mixture(4, 3, experts, (0, 1, 2, 3))
    check_routing(row, mixture)

    token = int(row.routed.nonzero()[0][1])
    named = row.routing.view(np.uint8 if experts <= 256 else np.uint16).reshape(len(row.tokens), 4, 3)
    named[token, 1, 2] = named[token, 1, 0]

    words = f"token {token} names experts {named[token, 1].tolist()} of layer 1, expected 3 different ones"
    with pytest.raises(RowError, match=re.escape(words)):
        check_routing(row, mixture)
    check_routing(row, mixture._replace(routed=(0, 2, 3)))  # of another stage
    check_routing(row, mixture._replace(tokens=lambda length: [range(token), range(token + 1, length)]))


def test_experts_of_other_layers_than_the_trained_model_has_are_refused():
    answer = Answer("generate", "", tokens=np.arange(5, dtype=np.int32))
    with pytest.raises(EngineRefused, match="6 experts of a token, expected as many for each of 4 layers"):
        keep_routing(answer, ended(np.zeros(48)), prompt=4, had=0, model=SHAPE._replace(layers=4))


@pytest.mark.parametrize("recorded", [0, 7])
def test_an_engine_that_returns_no_row_for_each_token_is_refused(recorded):
    with pytest.raises(EngineRefused, match=f"{recorded} routed experts for 8 tokens.*--enable-return-routed-experts"):
        answer = Answer("generate", "", tokens=np.arange(5, dtype=np.int32))
        keep_routing(answer, ended(np.zeros(recorded)), prompt=4, had=0, model=SHAPE)


async def test_an_engine_tells_the_experts_from_the_least_token_that_is_asked_for(model):
    prompts = [[3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 9]]
    engine = Engine(model, max_running=2, seed=0)
    engine.weight_version = KEY
    async with serving(engine) as address:
        client = EngineClient(address)

        async def tell(*first):
            each = [SamplingParams(3, 0.0, routed=one) for one in first]
            asked = (client.generate(ids, sampling) for ids, sampling in zip(prompts, each, strict=True))
            return await asyncio.gather(*asked)

        whole, rest = await tell(0, 0), await tell(5, 2)
        with pytest.raises(EngineRefused, match=r"routed_experts_start_len = 7, expected at most .* 6"):
            await client.generate(prompts[0], SamplingParams(3, routed=7))
        await client.close()

    assert [one.routed_from for one in rest] == [2, 2]
    for prompt, all_, part in zip(prompts, whole, rest, strict=True):
        rows, fed = all_.routed.reshape(-1, 4 * 2), len(prompt) + 2
        assert len(rows) == fed and np.array_equal(part.routed.reshape(-1, 4 * 2), rows[2:])
        whatever = msgspec.structs.replace(part, routed=all_.routed)  # of a build that ignores what was asked for
        for given in (part, whatever):
            answer = Answer("generate", "", routing=Experts(8, follows="0", first=3))
            keep_routing(answer, given, prompt=len(prompt), had=0, model=SHAPE._replace(layers=4))
            assert np.array_equal(rows_of(answer.routing), rows[3:])


class Recorded:
    """A server whose answers, with their experts, are given by the test."""

    exact, apart = True, False

    def __init__(self, *answers):
        self._answers = list(answers)

    async def generate(self, input_ids, sampling, **how):
        return self._answers.pop(0)(len(input_ids))

    def announced(self, key):
        """Do nothing: the answers name their weights."""

    async def close(self):
        """Do nothing: there are no connections."""


@pytest.mark.parametrize("before", ["of newer weights", "of a request that was not read"])
async def test_rows_of_no_token_of_the_answer_keep_out_none_of_it(before):
    ids, count = np.arange(3, 8, dtype=np.int32), 6

    def update(fed):
        fleet.apply(EngineReady("engine-1", "made", 0, 1, "made", 32))
        if before == "of a request that was not read":
            return some(0, "abort", np.tile([1, 2], fed - 1))
        return some(count, "length", np.tile([1, 2], fed + count - 1))

    def some(tokens, finish, routed):
        spans = [VersionSpan("0:1:made", 0, tokens)] if tokens else []
        tokens = np.arange(tokens, dtype=np.int32)
        return Generation(tokens, -np.ones(len(tokens), np.float32), spans, finish, routed.astype(np.int32))

    server = Recorded(update, lambda fed: some(count, "length", np.tile([3, 4], fed + count - 1)))
    fleet = Fleet(lambda *_: server, counts={}, fail=lambda error: None)
    fleet.apply(EngineReady("engine-1", "made", 0, 0, "made", 32))
    shape = ModelInfo("any", 64, 128, experts=8)
    generator = Generator(fleet, shape, str, counts={}, manner=RequestOptions(routed=True))
    answer = await generator.generate(ids, SamplingParams(count))
    await fleet.close()

    assert answer.versions.tolist() == [1] * count
    assert rows_of(answer.routing).tolist() == [[3, 4]] * (len(ids) + count - 1)


@pytest.mark.parametrize("records", [True, False])
def test_the_trainer_replays_what_it_chose_in_the_pass_before_the_update(model, monkeypatch, records):
    monkeypatch.setattr(replay_router, "replayed", unsteady)
    trainer = TorchTrainer(model, TorchSettings(micro_batch_tokens=64, records=records, replays=not records))

    assert (apart(trainer) < 1e-5) == records
