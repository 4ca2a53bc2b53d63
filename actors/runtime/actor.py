"""The context of every actor: its settings, its connection, its log, its vital signs, and a stop event."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from asyncrl.background import BackgroundTasks
from asyncrl.bus.address import BusAddress
from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusDenied, BusError, WrongSequence
from asyncrl.bus.listen import Listener, Take
from asyncrl.bus.log import Record
from asyncrl.bus.merged_reader import newest_message
from asyncrl.bus.publish import EXPECT_SUBJECT, publish, send
from asyncrl.bus.pull import Source
from asyncrl.config.renamed import read_settings
from asyncrl.config.settings import Config
from asyncrl.config.worker_pools import config_of_actor
from asyncrl.errors import AsyncRLError
from asyncrl.own_code import use_copies
from asyncrl.ports import LOOPBACK
from asyncrl.process import FATAL, living_descendants, name_of, process_cpu_s
from asyncrl.run.directory import RunFiles
from asyncrl.run.placement import Placement, open_placement
from asyncrl.run.user_actors import run_tables, user_module
from asyncrl.telemetry.gpu_use import GpuMeter
from topics.actors import RUN_OPENED, Activity, ActorStarted, ActorStopped, DeadLetter, HeldWork, RunOpened, Vitals
from topics.roles import OWN, ROLES, SUPERVISOR, Role
from topics.topic import Stream, Topic
from topics.wire import WireError

if TYPE_CHECKING:
    from nats.aio.msg import Msg  # loaded by `asyncrl.bus`, in its way

VITALS_S = 2.0
_LETTER_BYTES = 65536  # of a message's body that its dead letter keeps
_LETTERS_WHOLE = 256  # letters that wait; of those on top, only the first bytes are kept
_LETTERS_AT_ONCE = 32
_ON_GPUS = ("learner", "engine")  # roles whose processes may compute on GPUs


class ActorFault(AsyncRLError):
    """An error that another start would not mend; the message states what to do."""

    fatal = True


class ActorDown(AsyncRLError):
    """An actor lost something it needs; another start may help."""


@dataclass
class Context:
    """The environment of an actor: settings, connection, log, vital signs, stop event."""

    role: str
    actor_id: str
    config: Config
    files: RunFiles
    bus: Bus
    log: Any
    credentials: Path = Path()  # file with its login
    host: str = LOOPBACK  # IP address at which others reach servers that are started here
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # set: finish the running work and leave
    hurry: asyncio.Event = field(default_factory=asyncio.Event)  # set: it was asked to leave once more
    vitals: dict[str, float] = field(default_factory=dict)
    faults: list[BaseException] = field(default_factory=list)
    holding: Callable[[], list[HeldWork]] = list  # the oldest pieces of work it has
    sandbox_fault: Callable[[], str] = str  # why the newest sandbox did not start
    handed: Callable[[Callable[[Msg], None]], Source] | None = None  # source of work other than a queue
    _doing: tuple[Activity, float] = (Activity(), 0.0)
    _letters: deque[DeadLetter] = field(default_factory=deque)  # not yet kept
    _rejecting: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.tasks = BackgroundTasks(self.fail)  # a fault of one of them ends the actor

    @cached_property
    def placement(self) -> Placement:
        """The placement in which it starts processes of the run."""
        return open_placement(self.config, self.files)

    def count(self, name: str, by: float = 1) -> None:
        """Add to one of the actor's counters."""
        self.vitals[name] = self.vitals.get(name, 0) + by

    def doing(self, what: Activity) -> None:
        """Set the current activity, which the vital signs report with its duration."""
        self._doing = (what, time.monotonic())

    async def started(self, lost: str = "") -> None:
        """Publish that this process has started, or that it restarts a part it lost, with the reason."""
        if lost:
            self.log.warning("restarts a lost part", reason=lost)
        await publish(self.bus, ActorStarted(self.role, self.actor_id, socket.gethostname(), os.getpid(), lost))

    def take_vitals(self) -> Vitals:
        """Its vital signs at this moment."""
        doing, since = self._doing
        values = dict(self.vitals) | ({"doing_s": round(time.monotonic() - since, 1)} if doing.kind else {})
        return Vitals(
            self.role,
            self.actor_id,
            os.getpid(),
            time.time(),
            values,
            held=self.holding(),
            doing=doing,
            denied=self.bus.denied,
            sandbox_fault=self.sandbox_fault()[:500],
        )

    def leave(self) -> None:
        """Ask this actor to leave; asked once more, it hurries."""
        (self.hurry if self.stop.is_set() else self.stop).set()

    def fail(self, error: BaseException) -> None:
        """End this actor because of a fault in one of its tasks."""
        self.faults.append(error)
        self.stop.set()

    def listen(
        self,
        stream: Stream,
        take: Take,
        topics: Sequence[Topic[Any]] = (),
        *,
        unread: Callable[[Record], bool] = lambda _: False,
    ) -> Listener:
        """A listener to a log, or to some of its topics; it rejects a message that is malformed.

        Args:
            unread: as for `Listener`.
        """
        subjects = [topic.pattern(self.bus.run) for topic in topics]
        return Listener(self.bus, stream, take, self.refuse, subjects=subjects, unread=unread)

    def refuse(self, record: Record, error: Exception) -> None:
        """Reject a malformed message in a background task."""
        described = isinstance(error, WireError | BlobMissing)
        self.reject_soon(record, str(error) if described else f"{type(error).__name__}: {error}")

    async def reject(self, record: Record, reason: str, *, poison: bool = False) -> None:
        """Keep a message that cannot be read, or that ends its workers (poison), with the reason."""
        await self._keep_letter(self._letter(record, reason, poison=poison))

    def reject_soon(self, record: Record, reason: str) -> None:
        """Reject a message in a background task; at most `_LETTERS_AT_ONCE` rejections run at once."""
        self._letters.append(self._letter(record, reason))
        if self._rejecting is None or self._rejecting.done():
            self._rejecting = self.tasks.start(self._keep_letters())

    def _letter(self, record: Record, reason: str, *, poison: bool = False) -> DeadLetter:
        topic, stream = ".".join(record.subject.split(".")[2:4]), record.stream.name
        self.count("dead_letters")
        most = _LETTER_BYTES if len(self._letters) < _LETTERS_WHOLE else _LETTER_BYTES >> 8
        headers = {name[:128]: value[:1024] for name, value in list(record.headers.items())[:32]}
        if self.vitals["dead_letters"] <= _LETTERS_WHOLE or self.vitals["dead_letters"] % _LETTERS_WHOLE == 0:
            self.log.warning(
                "message rejected", topic=topic, stream=stream, sequence=record.sequence, reason=reason[:1024]
            )
        return DeadLetter(topic, stream, record.sequence, reason[:1024], headers, record.data[:most], poison)

    async def _keep_letters(self) -> None:
        while self._letters:
            some = [self._letters.popleft() for _ in range(min(_LETTERS_AT_ONCE, len(self._letters)))]
            await asyncio.gather(*map(self._keep_letter, some))

    async def _keep_letter(self, letter: DeadLetter) -> None:
        with contextlib.suppress(WrongSequence):  # another listener, or an earlier start, has rejected it
            await publish(self.bus, letter, headers={EXPECT_SUBJECT: "0"})


class Login(NamedTuple):
    """All that a process needs to be an actor of a run: its settings come over the bus."""

    role: str
    actor_id: str
    run: str
    credentials: Path
    address: str = ""  # of the server as seen from here; "" for the one in the credentials
    home: Path | None = None  # folder with the files sent to this host; None if the host has the run's directory
    host: str = LOOPBACK  # IP address at which others reach servers that are started here


async def open_context(login: Login, log: Any) -> Context:
    """Connect, and read the run's settings from its topics.

    Raises:
        ActorFault: the run was never opened, or by a program with other settings.
        OSError, DamagedFile: there are no such credentials.
        BusError: no connection.
    """
    address = BusAddress.read(login.credentials)
    if login.address:
        address = msgspec.structs.replace(address, url=login.address)
    bus = await Bus.connect(address, login.run, name=login.actor_id, deadline_s=30)
    try:
        opened, config = await _opened(bus)
        files = RunFiles(Path(opened.directory), Path(opened.base))
        if login.home is not None:
            files = RunFiles(login.home, login.home / "base", sent=True)
        use_copies(files.root)
        bus.tables = run_tables(config, files.base)
    except BaseException:
        await bus.close()
        raise
    bus.publish_deadline_s = config.nats.publish_deadline_s
    config = config_of_actor(config, login.actor_id)
    context = Context(login.role, login.actor_id, config, files, bus, log, login.credentials, login.host)
    bus.on_fault = context.fail
    return context


async def _opened(bus: Bus) -> tuple[RunOpened, Config]:
    newest = await newest_message(bus, RUN_OPENED)
    if newest is None:
        raise ActorFault(f"no run called {bus.run} was opened on the server at {bus.address.url}")
    opened, _ = newest
    try:
        return opened, read_settings(opened.settings)
    except msgspec.ValidationError as error:
        raise ActorFault(f"the settings of run {bus.run} cannot be read: {error}") from error


def module_of(context: Context) -> ModuleType:
    """Return the module of an actor: one of ours, or the user's.

    Raises:
        ActorFault: there is no such role in this run.
    """
    role, roles = context.role, context.bus.tables.role_names
    if role not in roles:
        raise ActorFault(f"no role is called {role!r} in this run; there are {', '.join(roles)}")
    if role in OWN:
        return importlib.import_module(OWN[role].module)
    return user_module(role, context.config.actors, context.files.base)


async def run_actor(context: Context, main: Any) -> int:
    """Run an actor's main coroutine until it ends or is asked to stop; returns the exit code."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, context.leave)
    bus, actor_id = context.bus, context.actor_id
    await context.started()
    vitals = asyncio.create_task(_publish_vitals(context))
    reason, code, denied = "", 0, False
    try:
        await main(context)
        if context.faults:
            raise context.faults[0]
        if context.role not in OWN and not context.stop.is_set():
            words = "its main returned, and nothing had asked it to leave; expected it to run until context.stop is set"
            raise ActorDown(words)
    except AsyncRLError as error:
        denied = isinstance(error, BusDenied)
        reason, code = str(error), FATAL if denied or error.fatal else 1
        context.log.error("actor stopped", reason=reason)
    except Exception as error:  # the supervisor and the log must have any error before the process ends
        reason, code = f"{type(error).__name__}: {error}", 1
        context.log.error("actor crashed", reason=reason, exc_info=error)
    vitals.cancel()
    try:
        async with asyncio.timeout(3):
            stopped = ActorStopped(context.role, actor_id, reason, denied, os.getpid(), again=code == 1)
            await publish(bus, stopped)
            await bus.close()
    except (BusError, TimeoutError):
        pass  # the server is gone too; the exit code reports the failure
    return code


def cpu_s(role: str, rows: Sequence[Role] = ROLES) -> float:
    """CPU seconds of this process, and of the inference server, graders or maker of rows that it started."""
    children = living_descendants(os.getpid()) if any(row.children for row in rows if row.name == role) else []
    return time.process_time() + sum(process_cpu_s(pid) for pid in children)


def server_cpu_s() -> float:
    """Return the CPU seconds of the NATS servers that the run's owner, who started the supervisor, started too."""
    siblings = living_descendants(os.getppid())
    return sum(process_cpu_s(pid) for pid in siblings if name_of(pid) == "nats-server")


async def _publish_vitals(context: Context) -> None:
    meters: dict[str, Callable[[], float]] = {"cpu_share": partial(cpu_s, context.role, context.bus.tables.roles)}
    if context.role == SUPERVISOR:
        meters["nats_cpu_share"] = server_cpu_s
    before, spent = time.monotonic(), {name: read() for name, read in meters.items()}
    gpus = GpuMeter() if context.role in _ON_GPUS else None
    while True:
        message = context.take_vitals()
        if gpus is not None:
            own = [os.getpid(), *living_descendants(os.getpid())]
            message.values.update(await asyncio.to_thread(gpus.read, own))
        now, spent_now = time.monotonic(), {name: read() for name, read in meters.items()}
        for name, seconds in spent_now.items():
            message.values[name] = round(max(0.0, seconds - spent[name]) / max(1e-9, now - before), 4)
        message.values["cpu_s"] = round(spent_now["cpu_share"], 3)
        before, spent = now, spent_now
        await send(context.bus, message)
        await asyncio.sleep(min(VITALS_S, context.config.supervision.silence_s / 4))
