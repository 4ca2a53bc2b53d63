"""A gateway that serves inside a test, in front of a server that answers by a script."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeAlias

from aiohttp import web

from actors.gateway.actor import Gateway
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import Record
from asyncrl.bus.merged_reader import Part, read_merged
from asyncrl.bus.publish import publish
from asyncrl.engine.embedded.scheduler import Engine
from asyncrl.engine.embedded.server import EngineServer
from asyncrl.live.keys import make_key
from asyncrl.ports import free_port
from harness.live_runs import conversing_model
from harness.sglang_like import Asked, LikeSGLang
from harness.stage import Stage, until
from harness.workers import KEY, SLOTS
from topics.engines import EngineReady
from topics.topic import TURNS
from topics.turns import TurnFinished, TurnSampled, TurnStarted


class Embedded:
    """The embedded engine, inside the test."""

    address = ""
    weight_version = ""

    @contextlib.asynccontextmanager
    async def serving(self, model: Path) -> AsyncIterator[None]:
        """Serve a model for the length of the block."""
        engine = Engine(model, max_running=SLOTS, seed=1)
        engine.weight_version = self.weight_version
        runner = web.ServerRunner(EngineServer(engine, incremental=True).protocol())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        stepping = asyncio.create_task(engine.run())
        try:
            yield
        finally:
            stepping.cancel()
            await runner.cleanup()


AnyEngine: TypeAlias = LikeSGLang | Embedded


class Served:
    """A gateway, a client's key, and what is stored of its turns."""

    def __init__(self, bus: Bus, stage: Stage, number: int = 1) -> None:
        self.context = stage.context("gateway", bus)
        self.context.actor_id = bus.name = f"gateway-{number}"
        self.bus = bus
        self.address = f"http://127.0.0.1:{stage.config.gateway.port}"
        self.gateway = Gateway(self.context)
        self.key = ""

    async def start(self, tenant: str = "anna") -> None:
        self.key, added = make_key(tenant)
        await publish(self.bus, added)
        before = _listeners(self.address)  # others may share the port
        self._running = asyncio.create_task(self.gateway.run())
        await until(lambda: self._running.done() or _listeners(self.address) > before, "the gateway listens")

    async def stop(self) -> None:
        self.context.stop.set()
        await asyncio.wait_for(self._running, 120)

    def count(self, name: str) -> float:
        return self.context.vitals.get(name, 0)


def _listeners(address: str) -> int:
    """Return how many sockets of this machine listen on the port of an address."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(port) and row[3] == "0A" for row in rows)


def gateway_stage(
    make_stage: Callable[..., Stage],
    model: Path,
    inference: AnyEngine,
    *,
    tools: bool = False,
    live: Any = None,
    routed: bool = False,
    **settings: Any,
) -> Stage:
    """Make the stage of a gateway; further arguments are settings of `gateway`.

    Args:
        routed: whether the model has experts, and their choice is replayed in training.
    """
    inference.weight_version = KEY
    return make_stage(
        model={"path": str(conversing_model(model, tools=tools, experts=routed))},
        learner={"routing": "replay"} if routed else {},
        engine={"kind": "external", "addresses": ["http://127.0.0.1:1"]},
        gateway={"count": 1, "port": free_port(), **settings},
        live=live or {},
    )


@contextlib.asynccontextmanager
async def gateway(
    bus: Bus, make_stage: Callable[..., Stage], model: Path, inference: AnyEngine, **settings: Any
) -> AsyncIterator[Served]:
    """Serve in front of an inference server; further arguments are settings of `gateway`."""
    served = Served(bus, gateway_stage(make_stage, model, inference, **settings))
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(inference, Embedded):
            await stack.enter_async_context(inference.serving(model))
        await served.start()
        await publish(bus, ready(inference))
        try:
            yield served
        finally:
            await served.stop()


def ready(inference: AnyEngine) -> EngineReady:
    """Return what the actor of an inference server states."""
    lineage, version, digest = KEY.split(":")
    return EngineReady("engine-1", inference.address, int(lineage), int(version), digest, SLOTS)


def in_two_halves(inference: LikeSGLang, tokens: int = 1) -> asyncio.Event:
    """Have each streamed answer stop after so many tokens, until the returned event is set."""
    go_on = asyncio.Event()

    async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        all_of_them = asked.tokens()
        yield inference.answer(asked, all_of_them[:tokens], None)
        await go_on.wait()
        yield inference.answer(asked, all_of_them[tokens:])

    inference.events = events
    return go_on


async def stored_turns(bus: Bus) -> list[TurnStarted | TurnSampled | TurnFinished]:
    """Return all facts about turns, in their order."""
    found: list[Any] = []

    def refuse(record: Record, error: Exception) -> None:
        raise AssertionError(f"message {record.sequence}: {error}")

    await read_merged(bus, [Part(TURNS)], lambda _topic, message, _record: found.append(message), refuse)
    return found


async def turns_of(bus: Bus) -> tuple[dict[str, TurnStarted], dict[str, TurnFinished]]:
    started, finished = {}, {}
    for message in await stored_turns(bus):
        if isinstance(message, TurnStarted | TurnFinished):
            kind = started if isinstance(message, TurnStarted) else finished
            assert message.turn_id not in kind
            kind[message.turn_id] = message
    return started, finished


async def finished_turn(bus: Bus, turn_id: str) -> TurnFinished:
    """Return a turn once it is stored: where the server is slow, the reply comes before."""
    found: dict[str, TurnFinished] = {}

    async def is_stored() -> bool:
        nonlocal found
        _, found = await turns_of(bus)
        return turn_id in found

    await until(is_stored, f"turn {turn_id} is stored")
    return found[turn_id]
