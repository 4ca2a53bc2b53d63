"""Servers of another owner join and leave a run while it goes on, as a user makes them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from actors.supervisor.fold import SupervisorFold
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from asyncrl.cli.engines import known_servers
from asyncrl.cli.main import run as run_command
from asyncrl.config.engine_settings import EngineGroup, EngineSettings
from asyncrl.config.settings import Config
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.state.run_state import RunState
from benchmarks.engine import served
from harness.audited import assert_within_lag, messages_on
from harness.configs import the_problem
from harness.folds import Feed
from harness.runs import LIMIT_S, UNTRAINED, address_of, command, up
from harness.sglang_like import like_sglang
from harness.stage import until
from topics.actors import ScaleRequested
from topics.engines import ENGINE_READY, EngineAnnounced, EngineWithdrawn, announced_name, version_of
from topics.promotions import PromotionRequested
from topics.topic import ENGINES
from topics.wire import Message, WireError


@pytest.mark.slow
async def test_servers_of_another_owner_join_and_leave_while_a_run_trains(tmp_path: Path):
    key_file = tmp_path / "key"
    key_file.write_text("the owner's key\n")

    @asynccontextmanager
    async def owned(model: Path) -> AsyncIterator[str]:
        async with served(model, "--api-key-file", str(key_file)) as address:
            yield address

    async with up(tmp_path, *UNTRAINED, "engine.kind=external", "learner.steps=10000", "buffer.max_lag=2") as run:
        model = run.root / "model"
        await run.reaches(lambda: run.actor("rollout-1"), "the first rollout worker")
        async with owned(model) as first, owned(model) as second:
            one, two = announced_name(first), announced_name(second)
            code, output = await command(tmp_path, "engines", "add", first, "--key-file", str(key_file))
            assert code == 0, output
            assert output.startswith(f"{one} has ")
            await run.reaches(run.steps, "the first step")
            code, output = await command(tmp_path, "engines", "add", second, "--key-file", str(key_file))
            assert code == 0, output
            code, output = await command(tmp_path, "engines", "add", f"{first}/")
            assert (code, output.count(f"{one} has version")) == (0, 1)  # a second announcement loads the weights again
            again = second.replace("127.0.0.1", "localhost")
            code, output = await command(tmp_path, "engines", "add", again)
            assert code and f"{two} of this run" in output and f"{again} is the same server: it is not added" in output

            code, output = await command(tmp_path, "engines", "remove", one)
            assert (code, output) == (0, f"{one} has left\n")
            code, output = await command(tmp_path, "engines", "--json")
            [listed] = json.loads(output)
            assert (listed["name"], listed["kind"], listed["address"]) == (two, "external", second)
            assert (listed["state"] in ("ready", "updating"), code) == (True, 0)
            assert not (run.root / f"{one}.key").exists()
            before = len(run.steps())
            await run.reaches(lambda: len(run.steps()) > before + 2, "further steps with the other server")
            code, _ = await command(tmp_path, "down")
            assert (code, await run.ended()) == (0, 0), run.story

    assert_within_lag(run, max_lag=2)
    code, output = await command(tmp_path, "audit")
    assert code == 0, output
    assert "0 failed" in run.out


@pytest.mark.slow
async def test_a_run_without_a_learner_serves_the_model_as_it_is_until_it_is_stopped(tmp_path: Path):
    async with up(tmp_path, "supervision.deaths=1", arguments=["--only", "engine"]) as run, like_sglang() as lent:

        async def listed() -> list[dict[str, str]]:
            code, output = await command(tmp_path, "engines", "--json")
            return json.loads(output) if code == 0 else []

        await run.reaches(lambda: run.actor("engine-1"), "an engine starts")
        bus = await Bus.connect(address_of(run), "short")

        async def serves() -> bool:
            return bool((await messages_on(bus, ENGINES)).on(ENGINE_READY))

        await until(serves, "the engine is ready", LIMIT_S)
        await bus.close()
        [engine] = await listed()
        assert engine["state"] == "ready"
        client = EngineClient(engine["address"], api_key=(run.root / "engine.key").read_text())
        answer = await client.generate([3, 4, 5], SamplingParams(4))
        await client.close()
        code, output = await command(tmp_path, "doctor")
        assert (code, output.count("serving: 1 of 1 engines take requests")) == (0, 1)
        lent.key = "the owner's"
        code, output = await command(tmp_path, "engines", "add", lent.address, "--wait", "0.1")
        assert (code, "is announced and has not confirmed the weights" in output) == (1, True), output

        async def refuses() -> bool:
            return any("HTTP 401: Unauthorized" in engine["reason"] for engine in await listed())

        await until(refuses, "the server refuses the run", 180)
        code, output = await command(tmp_path, "engines", "add", lent.address, "--wait", "0.1")
        assert (code, "HTTP 401: Unauthorized" in output) == (1, True), output
        code, output = await command(tmp_path, "engines")
        assert output.splitlines()[1].split()[:4] == [announced_name(lent.address), "external", "gone", "-"], output
        assert output.endswith(f"{lent.address}  engine {lent.address}: HTTP 401: Unauthorized\n")
        (tmp_path / "key").write_text(lent.key)  # the run goes on without it
        code, output = await command(tmp_path, "engines", "add", lent.address, "--key-file", str(tmp_path / "key"))
        assert (code, output) == (0, f"{announced_name(lent.address)} has version 0\n")
        assert not [run.actor(f"{role}-1") for role in ("prompter", "rollout", "learner") if run.actor(f"{role}-1")]
        code, _ = await command(tmp_path, "down")
        assert (code, await run.ended()) == (0, 0), run.story

    assert [span.version for span in answer.weight_versions] == ["0:0:model"]


def test_only_takes_roles():
    assert 'found "nobody", expected roles: prompter, rollout' in the_problem("demo", "only=['nobody']").message


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("http://gpu7:30000", "engine-at-gpu7-30000"),
        ("http://10.0.0.5:8000/v/", "engine-at-10-0-0-5-v-8000"),
        ("https://[::1]", "engine-at-1-443"),
    ],
)
def test_the_name_of_an_announced_server_follows_from_its_address(address: str, name: str):
    assert announced_name(address) == name
    assert EngineSettings().group_of(name).kind == "external"


@pytest.mark.parametrize("words", [["engines", "add"], ["engines", "run", "list", "it"]])
def test_words_that_engines_does_not_know_are_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert run_command(words) == 2
    assert "expected `asyncrl engines [RUN] list`" in capsys.readouterr().err


def test_what_is_no_address_of_an_engine_is_refused():
    for address in ("gpu7:30000", "http://", "http://a b", "ftp://a:1"):
        with pytest.raises(ValueError, match="is no address of an engine; expected http://host:port"):
            announced_name(address)
    with pytest.raises(ValueError, match="'engine-large-1' is of no group of engines here; there are engine"):
        EngineSettings().group_of("engine-large-1")


@pytest.mark.parametrize("message", [EngineAnnounced("engine-at-a-1", "http://a:1", 0), PromotionRequested(2**31)])
async def test_a_request_that_nobody_would_read_is_refused_where_it_is_made(bus: Bus, message: Message):
    with pytest.raises(WireError, match=f"not a {type(message).__name__}: Expected `int`"):
        await publish(bus, message)


def test_labels_of_other_owners_are_no_names_of_weights():
    assert version_of("1:23:d") == (1, 23)
    for label in ("default", "0:\u0663:d", "0:-1:d", "0:99999999999:d", "0:1"):
        with pytest.raises(ValueError, match="is no name of weights"):
            version_of(label)


def test_a_server_of_the_config_may_be_added_once_it_was_removed():
    at, state = "http://127.0.0.1:30000", RunState("a-run")
    state.config.engine = EngineSettings(groups={"lent": EngineGroup(kind="external", addresses=[at])})
    assert known_servers(state) == {at: "engine-lent-1"}

    state.withdrawn.add("engine-lent-1")

    assert known_servers(state) == {}


def test_an_engine_is_wanted_from_its_announcement_until_it_is_withdrawn():
    fed = Feed(SupervisorFold(Config()))
    for name in ("engine-at-a-1", "engine-at-b-1", "engine-at-a-1"):
        fed.publish(EngineAnnounced(name, f"http://{name[10]}:1"))
    assert fed.fold.state.announced == ["engine-at-a-1", "engine-at-b-1"]

    fed.publish(EngineWithdrawn("engine-at-a-1")).publish(EngineWithdrawn("engine-1"))
    assert fed.fold.state.announced == ["engine-at-b-1"]
    assert fed.fold.state.withdrawn == {"engine-at-a-1", "engine-1"}

    for name, address in (("nobody-7", "http://a:1"), ("engine-at-b-1", "http://a:1"), ("engine-at-x", "x")):
        with pytest.raises(ValueError, match="expected"):  # a keeper makes a dead letter of it
            fed.publish(EngineAnnounced(name, address))
    with pytest.raises(ValueError, match="is of no group of engines here"):
        fed.publish(EngineWithdrawn("nobody-7"))

    fed.publish(EngineAnnounced("engine-at-a-1", "http://a:1"))
    assert (fed.fold.state.announced[-1], fed.fold.state.withdrawn) == ("engine-at-a-1", {"engine-1"})
    fed.publish(ScaleRequested({"engine-large": 2, "learner": 3}))
    assert {pool: wish.count for pool, wish in fed.fold.state.scaling.asked.items()} == {"engine-large": 2}
