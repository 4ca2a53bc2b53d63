"""Engine actors inside a test's own process, and what is known of the versions that they take out of memory."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from actors.engine.actor import EngineActor
from actors.runtime.actor import Context
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.control import read_key
from harness.stage import until
from harness.versions import Answers
from topics.engines import EngineReady


@asynccontextmanager
async def playing(context: Context, number: int | str = 1) -> AsyncIterator[EngineActor]:
    """An engine actor inside this process, with a server of its own."""
    actor = EngineActor(dataclasses.replace(context, actor_id=f"engine-{number}", stop=asyncio.Event(), vitals={}))
    task = asyncio.create_task(actor.run())
    yield actor
    actor.context.stop.set()
    await asyncio.gather(task, return_exceptions=True)


def server_of(actor: EngineActor) -> psutil.Process:
    """Return the process of an actor's server."""
    return psutil.Process(actor._server._process.pid)


async def senders_are_there(actor: EngineActor) -> None:
    """A version that comes before is read from the store."""
    assert actor._direct is not None
    direct = actor._direct
    await until(lambda: direct.kind == "ipc" or direct._senders() is not None, "the senders are there")


def ready_of(answers: Answers, engine_id: str = "engine-1") -> list[EngineReady]:
    """Return what an engine confirmed."""
    return [one for one in answers.messages if isinstance(one, EngineReady) and one.engine_id == engine_id]


def ways(answers: Answers, engine_id: str = "engine-1") -> dict[int, str]:
    """Return the way by which each version reached an engine."""
    return {message.version: message.direct for message in ready_of(answers, engine_id)}


async def reached(answers: Answers, version: int, engine_id: str = "engine-1") -> None:
    """Wait until an engine has a version."""
    await until(lambda: version in ways(answers, engine_id), f"{engine_id} has version {version}")


async def sampled(context: Context, answers: Answers, engine_id: str) -> tuple[str | None, list[float]]:
    """The label and log-probs of what an engine answers now."""
    ready = ready_of(answers, engine_id)[-1]
    client = EngineClient(
        ready.address, api_key=read_key(context.files.engine_key_file(context.config.engine, engine_id))
    )
    answer = await client.generate([3, 4, 5], SamplingParams(4, temperature=0.0))
    label = await client.label()
    await client.close()
    return label, [
        round(logprob, 3) for logprob in answer.logprobs.tolist()
    ]  # a product's last bits vary with alignment
