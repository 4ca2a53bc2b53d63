"""Every kind of inference server does what its engine actor asks for, also one of the test's own."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from actors.engine.actor import EngineActor
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import WRITER, publish
from asyncrl.config.engine_settings import EngineGroup, EngineSettings
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.control import EngineControl, ServerSpec, open_control
from asyncrl.engine.embedded.control import EmbeddedControl
from asyncrl.engine.server_load import EngineLoad
from asyncrl.engine.sglang.control import SGLangControl
from asyncrl.engine.starting import EngineFailed
from benchmarks.engine import save_random_model
from harness.sglang_like import like_sglang
from harness.stage import Stage, until
from harness.versions import empty_version
from topics.engines import ENGINE_READY, EngineReady
from topics.wire import decode


class OwnControl(EngineControl):
    """A second implementation: a server in the test's own process, that keeps to the order of the calls."""

    def __init__(self, home: ServerSpec) -> None:
        self.address = "own:1"
        self._label, self._held, self._open = "none", False, False

    async def start(self) -> None:
        self._open = True

    async def health(self) -> bool:
        return self._open

    async def weights(self) -> tuple[str, str]:
        return self._label, ""

    async def load(self) -> EngineLoad:
        return EngineLoad(0, 0)

    async def hold(self, *, keep: bool = False) -> None:
        self._held = True

    async def load_weights(self, directory: Path, key: str) -> None:
        assert self._held
        self._label = key

    async def resume(self) -> None:
        self._held = False

    async def close(self) -> None:
        self._open = False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_random_model(directory, vocab=64, hidden=32, layers=2)
    return directory


def home(model: Path, logs: Path, **settings: object) -> ServerSpec:
    return ServerSpec("engine-1", EngineSettings(**settings), model, logs / "engine-1.server.log", None)


@asynccontextmanager
async def controlled(kind: str, model: Path, logs: Path) -> AsyncIterator[EngineControl]:
    async with like_sglang() as server:
        if kind == "own":
            yield OwnControl(home(model, logs))
        else:
            yield open_control(home(model, logs, kind=kind, addresses=[server.address]))


@pytest.mark.parametrize(("keep", "finish"), [(False, "abort"), (True, "length")])
async def test_a_request_that_reaches_a_held_engine_is_sent_back_where_none_is_kept(
    model: Path, tmp_path: Path, keep: bool, finish: str
):
    server = EmbeddedControl(home(model, tmp_path))
    await server.start()
    client = EngineClient(server.address)
    await server.hold(keep=keep)
    late = asyncio.create_task(client.generate([1, 2, 3], SamplingParams(4, ignore_eos=True)))
    await until(lambda: is_queued(server), "the request")
    await server.resume()
    generation = await late
    await client.close()
    await server.close()

    assert (generation.finish_reason, len(generation.token_ids)) == (finish, 4 if keep else 0)


async def is_queued(server: EngineControl) -> bool:
    return (await server.load()).requests == 1


@pytest.mark.parametrize("number", [1, 2])
def test_the_servers_of_a_group_share_out_its_gpus_and_have_its_arguments(tmp_path: Path, number: int):
    large = EngineGroup(kind="sglang", count=2, gpus=[2, 3, 6, 7], arguments=["--tp-size", "2"], max_running=9)
    settings = EngineSettings(groups={"large": large, "small": EngineGroup()}, context=100)
    server = SGLangControl(ServerSpec(f"engine-large-{number}", settings, tmp_path, tmp_path / "log", None))

    assert server.environment()["CUDA_VISIBLE_DEVICES"] == {1: "2,3", 2: "6,7"}[number]
    assert server.arguments()[-7:] == [
        *("--max-running-requests", "9", "--incremental-streaming-output"),
        *("--context-length", "100", "--tp-size", "2"),
    ]


@pytest.mark.parametrize("kind", ["embedded", "external", "scripted", "own"])
async def test_a_server_starts_takes_weights_by_name_and_leaves(kind: str, model: Path, tmp_path: Path):
    async with controlled(kind, model, tmp_path) as server:
        await server.start()
        ended = asyncio.create_task(server.ended())
        try:
            assert await server.health()
            await server.hold()
            await server.load_weights(model, "0:1:first")
            await server.resume()

            assert (await server.weights())[0] == "0:1:first"
            assert (await server.load()).requests == 0
            assert not server.frozen
            assert not ended.done()
        finally:
            await server.close()
        if server.own:
            assert (await asyncio.wait_for(ended, 300)).startswith("exit code")
        ended.cancel()


async def test_a_held_server_returns_what_runs_with_its_partial_tokens(model: Path, tmp_path: Path):
    async with controlled("embedded", model, tmp_path) as server:
        await server.start()
        client, begun = EngineClient(server.address), asyncio.Event()
        running = asyncio.create_task(
            client.generate(
                [1, 2, 3], SamplingParams(100, ignore_eos=True), on_tokens=lambda _: begun.set(), stream_interval=1
            )
        )
        try:
            await asyncio.wait_for(begun.wait(), 120)
            await server.hold()
            partial = await asyncio.wait_for(running, 300)
            await server.resume()

            assert partial.finish_reason in ("abort", "length")
            assert 0 < len(partial.token_ids) <= 100
            assert len((await client.generate([1, 2, 3], SamplingParams(4, ignore_eos=True))).token_ids) == 4
        finally:
            await client.close()
            await server.close()


async def test_a_server_that_ends_while_it_starts_fails_with_its_last_output(tmp_path: Path):
    server = EmbeddedControl(home(tmp_path / "nothing", tmp_path))

    with pytest.raises(EngineFailed, match=r"the server ended: exit code 1:(.|\n)*nothing"):
        await server.start()
    await server.close()


async def test_the_engine_actor_brings_any_kind_to_the_newest_weights(
    bus: Bus, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("actors.engine.actor.open_control", OwnControl)
    context = stage(engine={"kind": "scripted"}).context("engine", bus)
    actor = EngineActor(context)
    running = asyncio.create_task(actor.run())
    await publish(bus, empty_version(context.files, 1), headers={WRITER: "learner"})

    async def is_ready() -> bool:
        found = await read_last(bus, ENGINE_READY, "engine-1")
        return found is not None and decode(EngineReady, found.data).address == "own:1"

    await until(is_ready, "the engine is ready")
    context.stop.set()
    await asyncio.wait_for(running, 300)
