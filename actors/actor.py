"""What every actor has: its settings, its connection, its log, its vital signs, and a way to be stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import Record
from asyncrl.bus.server import BusAddress
from asyncrl.bus.talk import TwoContents, say
from asyncrl.settings import Cast
from topics.actors import (
    ACTOR_STARTED,
    ACTOR_STOPPED,
    DEAD_LETTER,
    VITALS_TAKEN,
    ActorStarted,
    ActorStopped,
    DeadLetter,
    Vitals,
)

VITALS_S = 2.0


FATAL = 3  # exit code of an actor that another start cannot help


class ActorFault(Exception):
    """An actor cannot go on, and another start would not help; the message says what to do."""


class ActorDown(Exception):
    """An actor lost something it needs; another start may help."""


@dataclass
class RunFiles:
    """Where a run keeps its files."""

    root: Path

    @property
    def cast(self) -> Path:
        """The settings as they were resolved at the start."""
        return self.root / "cast.json"

    @property
    def address(self) -> Path:
        """How to reach the run's topics; private."""
        return self.root / "nats.json"

    @property
    def logs(self) -> Path:
        """One file per actor."""
        return self.root / "logs"

    @property
    def base(self) -> Path:
        """The folder that relative paths of the cast start from."""
        return Path((self.root / "base").read_text())

    @property
    def model(self) -> Path:
        """The untrained model, where the run made it."""
        return self.root / "model"

    @property
    def weights(self) -> Path:
        """The weight store."""
        return self.root / "weights"

    @property
    def checkpoints(self) -> Path:
        """One directory per checkpoint."""
        return self.root / "checkpoints"

    def model_path(self, cast: Cast) -> Path:
        """The Hugging Face directory that training starts from."""
        return self.base / cast.model.path if cast.model.path else self.model

    def read_cast(self) -> Cast:
        """Read the run's settings."""
        return msgspec.json.decode(self.cast.read_bytes(), type=Cast)


@dataclass
class Context:
    """What an actor is given."""

    role: str
    actor_id: str
    cast: Cast
    files: RunFiles
    bus: Bus
    log: Any
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # set: finish what is under way and leave
    vitals: dict[str, float] = field(default_factory=dict)
    faults: list[BaseException] = field(default_factory=list)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def count(self, name: str, by: float = 1) -> None:
        """Add to one of the actor's counters."""
        self.vitals[name] = self.vitals.get(name, 0) + by

    def fail(self, error: BaseException) -> None:
        """End this actor because of a fault in one of its tasks."""
        self.faults.append(error)
        self.stop.set()

    def watch(self, task: asyncio.Task[Any]) -> None:
        """End this actor when a task of its own dies of a fault."""

        self._tasks.add(task)  # the loop itself holds tasks only weakly

        def done(finished: asyncio.Task[Any]) -> None:
            self._tasks.discard(finished)
            if not finished.cancelled() and (error := finished.exception()) is not None:
                self.fail(error)

        task.add_done_callback(done)

    async def bury(self, record: Record, reason: str) -> None:
        """Keep a message that cannot be read, with the reason."""
        topic, stream = ".".join(record.subject.split(".")[2:4]), record.stream.name
        letter = DeadLetter(topic, stream, record.sequence, reason, record.headers, record.data[:65536])
        with contextlib.suppress(TwoContents):  # another listener has buried it, in words of its own
            await say(self.bus, DEAD_LETTER, letter, key=self.actor_id, id=f"{stream}:{record.sequence}")
        self.count("dead_letters")
        self.log.warning("message unreadable", topic=topic, stream=stream, sequence=record.sequence, reason=reason)


async def open_context(role: str, actor_id: str, run_dir: Path, log: Any) -> Context:
    """Read the run's files and connect."""
    files = RunFiles(run_dir)
    cast = files.read_cast()
    bus = await Bus.connect(
        BusAddress.read(files.address),
        cast.run,
        name=actor_id,
        deadline_s=30,
        publish_deadline_s=cast.nats.publish_deadline_s,
    )
    context = Context(role, actor_id, cast, files, bus, log)
    bus.on_fault = context.fail
    return context


async def play(context: Context, main: Any) -> int:
    """Run an actor's main coroutine until it ends or is asked to stop; returns the exit code."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, context.stop.set)
    bus, actor_id = context.bus, context.actor_id
    started = ActorStarted(context.role, actor_id, socket.gethostname(), os.getpid())
    await say(bus, ACTOR_STARTED, started, key=actor_id, id=_life_id(actor_id))
    vitals = asyncio.create_task(_tell_vitals(context))
    reason, code = "", 0
    try:
        await main(context)
        if context.faults:
            raise context.faults[0]
    except (ActorFault, ActorDown, BusError) as error:
        reason, code = str(error), FATAL if isinstance(error, ActorFault) else 1
        context.log.error("actor stopped", reason=reason)
    except Exception as error:  # whatever it is, the warden and the log must hear of it before the process ends
        reason, code = f"{type(error).__name__}: {error}", 1
        context.log.error("actor crashed", reason=reason, exc_info=error)
    vitals.cancel()
    try:
        async with asyncio.timeout(3):
            stopped = ActorStopped(context.role, actor_id, reason)
            await say(bus, ACTOR_STOPPED, stopped, key=actor_id, id=_life_id(actor_id))
            await bus.close()
    except (BusError, TimeoutError):
        pass  # the server is gone too; the exit code speaks
    return code


def _life_id(actor_id: str) -> str:
    """An actor says the same words in each of its lives, and each time they are news."""
    return f"{actor_id}:{time.time_ns()}"


async def _tell_vitals(context: Context) -> None:
    started, cpu = time.monotonic(), time.process_time()
    subject = VITALS_TAKEN.subject(context.bus.run, context.actor_id)
    while True:
        values = dict(context.vitals)
        values["cpu_s"] = round(time.process_time(), 3)
        values["cpu_share"] = round((time.process_time() - cpu) / max(1e-9, time.monotonic() - started), 4)
        started, cpu = time.monotonic(), time.process_time()
        message = Vitals(context.role, context.actor_id, os.getpid(), time.time(), values)
        message.v = message.V
        if context.bus.client.is_connected:
            await context.bus.send(subject, msgspec.json.encode(message))
        await asyncio.sleep(VITALS_S)
