"""Whole runs as a user starts them: `asyncrl up` as a process, watched from outside, with nothing of it left behind."""

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.server import EmbeddedServer
from asyncrl.process import python
from harness.gated import move

LIMIT_S = 300.0  # no run of a test is longer; a loaded machine takes many times as long as an idle one
_PROGRAM = ("-m", "asyncrl.cli.main")
_MARK = "ASYNCRL_TEST_RUN"  # environment variable that every process of a run inherits
_GONE_S = 120.0  # for the kernel to take processes whose parent was killed
_DYING_S = 10.0  # for those to end that the kernel kills as their parent ends: nobody waits for them

SHORT = """
run = "short"
[task]
options = { letters = 4 }
[warmup]
steps = 4
batch_rows = 32
rows_per_trajectory = 16
lr_warmup_steps = 2
[rollout]
group_size = 4
max_new_tokens = 7
[buffer]
batch_groups = 8
[recorder]
plot = false
[learner]
steps = 5
lr = 1e-3
"""

PACED = f"task.rollout={Path(__file__).with_name('paced.py')}:rollout"
"""Setting of a run that goes on until its test has seen enough: else it trains with all that the machine has."""

GATED = "task.rollout=gated.py:rollout"
"""Setting of a run that is held by a gate (`closed_gate`) in its folder."""

UNTRAINED = ("learner.trainer=scripted", "learner.scripted_step_s=0.2", "warmup.steps=0")
"""Settings of a run in which it does not matter what is learned: no process loads torch to train."""
WITHOUT_MODEL = (*UNTRAINED, "engine.kind=scripted")
"""Settings of a run in which it does not matter what is sampled either."""


class Run:
    """A started `asyncrl up` and what it leaves in its folder."""

    def __init__(self, folder: Path, name: str, mark: str, process: asyncio.subprocess.Process) -> None:
        self.folder = folder
        self.root = folder / "runs" / name
        self.process = process
        self.code: int | None = None
        self.out = ""
        self.error = ""
        self._mark = mark
        self._ending = asyncio.create_task(process.communicate())

    async def ended(self, limit_s: float = LIMIT_S) -> int:
        """Wait until it ends by itself; returns its exit code."""
        await asyncio.wait({self._ending}, timeout=limit_s)
        assert self._ending.done(), f"{self.root.name} did not end within {limit_s:.0f} s"
        out, error = self._ending.result()
        self.out, self.error = out.decode(), error.decode()
        self.code = self.process.returncode
        assert self.code is not None
        return self.code

    @property
    def ended_by_itself(self) -> bool:
        """Return whether its process has ended."""
        return self._ending.done()

    async def reaches(self, condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> None:
        """Wait for something in the middle of the run; fail aloud when it does not come, or the run ends before."""
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    if self._ending.done():
                        await self.ended()
                        pytest.fail(f"the run ended before {what}: {self.story}")
                    await asyncio.wait({self._ending}, timeout=0.1)  # nothing announces it
        except TimeoutError:
            pytest.fail(f"not within {limit_s:.0f} s: {what}")

    def interrupt(self) -> None:
        """Interrupt a command as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    @property
    def story(self) -> str:
        """All it said, for the message of a failed assertion."""
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.error}"

    @property
    def summary(self) -> dict[str, Any]:
        """`summary.json`."""
        found: dict[str, Any] = json.loads((self.root / "summary.json").read_text())
        return found

    def rows(self, event: str = "step") -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl` so far."""
        try:
            lines = (self.root / "metrics.jsonl").read_text().split("\n")[:-1]  # the last one may be half written
        except FileNotFoundError:
            return []
        return [row for row in map(json.loads, lines) if row["event"] == event]

    def steps(self) -> list[int]:
        """RL steps in `metrics.jsonl`."""
        return [row["step"] for row in self.rows() if row["stage"] == "rl"]

    def log(self, actor_id: str) -> str:
        """Return what an actor wrote into its log."""
        return (self.root / "logs" / f"{actor_id}.log").read_text()

    def events(self, actor_id: str) -> list[dict[str, Any]]:
        """Lines of the log of an actor so far, but for those that are no JSON: of libraries, or half written."""
        lines = self.log(actor_id).split("\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def processes(self) -> dict[int, str]:
        """Command lines of the living processes that came from this run, by process id."""
        return {pid: line for pid, line, _ in self._living()}

    def visible(self) -> list[bytes]:
        """Command lines and environments of them, as a process list shows them."""
        return [text for _, line, environment in self._living() for text in (line.encode(), environment)]

    def _living(self) -> list[tuple[int, str, bytes]]:
        marked = f"{_MARK}={self._mark}".encode()
        return [process for process in all_processes() if marked in process[2]]

    def server(self) -> int | None:
        """Process id of its NATS server, where it lives."""
        return next((pid for pid, line in self.processes().items() if "nats-server" in line), None)

    def actor(self, actor_id: str) -> int | None:
        """Process id of an actor, where it lives."""
        mine = self.processes().items()
        return next((pid for pid, line in mine if "actors.main" in line and f" {actor_id} " in line), None)

    async def kill(self, actor_id: str) -> None:
        """End an actor as a crash of its machine would, as soon as it is there: it may just be restarting."""
        await self.reaches(lambda: self._killed(actor_id), f"{actor_id} is there to be killed")

    def _killed(self, actor_id: str) -> bool:
        pid = self.actor(actor_id)
        return pid is not None and _kill(pid)

    async def gone(self) -> None:
        """Kill what still lives; an assertion error when `up` had ended and something lived on."""
        ended = self.process.returncode is not None
        if ended:
            with contextlib.suppress(TimeoutError):
                await self._gone(_DYING_S)
        left = self.processes()
        if not ended:
            self.process.kill()
        await self._ending
        await self._gone(_GONE_S, _kill)
        assert not (ended and left), f"processes outlived `asyncrl up`: {left}"

    async def _gone(self, limit_s: float, touch: Callable[[int], object] = lambda _: None) -> None:
        async with asyncio.timeout(limit_s):
            while living := self.processes():
                for pid in living:
                    touch(pid)
                await asyncio.sleep(0.02)


@asynccontextmanager
async def up(folder: Path, *settings: str, config: str = SHORT, arguments: Sequence[str] = ()) -> AsyncIterator[Run]:
    """Run `asyncrl up` in `folder` with `--set` for each of the settings; nothing of it outlives the context.

    Args:
        folder: the working directory; the run's own is `runs/NAME` in it.
        settings: `KEY=VALUE`.
        config: TOML text, or the name of a shipped config.
        arguments: further words of the command line.
    """
    if "\n" in config:
        file = folder / f"{secrets.token_hex(4)}.toml"
        file.write_text(config)
        name = "short"
    else:
        file, name = Path(config), config
    name = next((setting.removeprefix("run=") for setting in settings if setting.startswith("run=")), name)
    words = [word for setting in settings for word in ("--set", setting)]
    async with _started(folder, name, *_PROGRAM, "up", str(file), *words, *arguments) as run:
        yield run


@asynccontextmanager
async def resume(folder: Path, name: str, *words: str) -> AsyncIterator[Run]:
    """Run `asyncrl up --resume NAME` in `folder`, with further words of the command line."""
    async with _started(folder, name, *_PROGRAM, "up", "--resume", name, *words) as run:
        yield run


@asynccontextmanager
async def resume_as_job(folder: Path, name: str, address: str, *words: str) -> AsyncIterator[Run]:
    """As `resume`, started by the job manager of a Ray cluster; its processes end with the cluster."""
    resumed = shlex.join(python(*_PROGRAM, "up", "--resume", name, *words))
    job = (str(Path(__file__).with_name("ray_job.py")), address, str(folder), f"cd {folder} && {resumed}")
    async with _started(folder, name, *job) as run:
        yield run


@asynccontextmanager
async def fork(folder: Path, name: str, new: str, *words: str) -> AsyncIterator[Run]:
    """Run `asyncrl fork NAME NEW` in `folder`, with further words of the command line."""
    async with _started(folder, new, *_PROGRAM, "fork", name, new, *words) as run:
        yield run


@asynccontextmanager
async def _started(folder: Path, name: str, *words: str) -> AsyncIterator[Run]:
    mark = secrets.token_hex(8)
    process = await asyncio.create_subprocess_exec(
        *python(*words),
        cwd=folder,
        env={**os.environ, _MARK: mark, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    run = Run(folder, name, mark, process)
    try:
        yield run
    finally:
        await run.gone()


@asynccontextmanager
async def topics_left_in(root: Path) -> AsyncIterator[Bus]:
    """The topics of a run that has ended, from the store in its directory."""
    server = EmbeddedServer(root)
    bus = await Bus.connect(await server.start(), root.name)
    try:
        yield bus
    finally:
        await bus.close()
        await server.stop()


async def command(folder: Path, *words: str, limit_s: float = LIMIT_S) -> tuple[int, str]:
    """Run `asyncrl WORDS` to its end; returns its exit code and all it said."""
    process = await asyncio.create_subprocess_exec(
        *python(*_PROGRAM, *words),
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(limit_s):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode()


def at_server(server: EmbeddedServer, folder: Path) -> list[str]:
    """Settings of a run whose topics live on a server that the test owns."""
    (folder / "password").write_text(server.address.password)
    return [
        f'nats.url="{server.address.url}"',
        f'nats.user="{server.address.user}"',
        f'nats.password_file="{folder / "password"}"',
        "nats.stream_max_mb=64",
        "nats.ledger_max_mb=32",
    ]


def address_of(run: Run) -> BusAddress:
    """Return the address of a run's topics."""
    return BusAddress.read(run.root / "nats.json")


def kill(pid: int | None) -> None:
    """End a process as a crash of its machine would."""
    assert pid is not None, "the process to be killed is not there"
    os.kill(pid, signal.SIGKILL)


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False  # it ended by itself in this moment
    return True


def all_processes() -> Iterator[tuple[int, str, bytes]]:
    """Process id, command line and environment of every living process of this user."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                yield int(folder.name), line, (folder / "environ").read_bytes()
            except OSError:
                continue  # it ended in this moment, or is somebody else's


async def two_steps_more(run: Run, what: str, gate: Path | None = None) -> None:
    """Wait for two steps; a gate (`closed_gate`) is moved so that there are two, and no more than its lag behind."""
    at = len(run.steps())
    if gate is not None:
        move(gate, at + 2)
    await run.reaches(lambda: len(run.steps()) > at + 1, what)
