"""Child processes: tied to their parent, and ended in good time."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import signal
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from asyncrl.config.process_settings import SupervisionSettings

_PR_SET_PDEATHSIG = 1
_TIDY = (b"torch_shm_manager", b"multiprocessing.resource_tracker", b"asyncrl.guard")
"""Names of processes that remove memory and processes of others, and then end."""
_MARK = "ASYNCRL_CHILD_"  # begins the name of a variable that a child has, and all that it starts
_TAIL_BYTES, _TAIL_LINES = 4096, 3
_FRAME = ("event", "actor", "level", "timestamp")  # in every line of an actor's log


def python(*words: str) -> list[str]:
    """A command line for this interpreter; modules in the working folder are ignored."""
    return [sys.executable, "-P", *words]


def log_tail(log: Path, since: int = 0) -> str:
    """The last lines of a log after its first `since` bytes; only the reason if an actor's last line has one."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(since if since <= end else 0, end - _TAIL_BYTES))  # it may have been cut
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    reason = _fields(lines[-1]).get("reason") if lines else ""
    return str(reason or " | ".join(map(_said, lines[-_TAIL_LINES:])) or "no output")


def _fields(line: str) -> dict[str, Any]:
    """Return the fields of a line of an actor's log; empty for other lines."""
    try:
        fields = json.loads(line)
    except ValueError:
        return {}  # of a library, or cut at its beginning
    return fields if isinstance(fields, dict) and "event" in fields else {}


def _said(line: str) -> str:
    """Return a line of a log in words: the event and the fields of an actor's JSON, the last line of an exception."""
    fields = _fields(line)
    if not fields:
        return line
    known = {name: str(value).strip().rpartition("\n")[2] for name, value in fields.items() if name not in _FRAME}
    return " ".join([str(fields["event"]), *(f"{name}={value}" for name, value in known.items())])


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel (Linux) to send this process a signal when `parent`, which started it, dies; end now if it has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def with_parent() -> Callable[[], None]:
    """`preexec_fn` for a child that shall not outlive this process."""
    return partial(die_with, os.getpid())


def _apart(parent: int) -> None:
    """Leave the process group and the terminal of the parent, but not its session: see `ChildProcess.start`."""
    die_with(parent)
    os.setpgid(0, 0)
    with contextlib.suppress(OSError):  # there is none
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
        os.close(terminal)


class LivingProcess(NamedTuple):
    """A process of this machine that has not ended."""

    parent: int
    group: int


def living_processes() -> dict[int, LivingProcess]:
    """Return all processes of this machine by process id, where the kernel reports them (Linux)."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent, group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if state not in "ZX":
                found[int(stat.parent.name)] = LivingProcess(int(parent), int(group))
    return found


def descendants(pid: int, living: dict[int, LivingProcess]) -> list[int]:
    """Return the living processes that descend from one, as far as their parents are known."""
    found, parents = list[int](), {pid}
    while parents:
        parents = {one for one, process in living.items() if process.parent in parents}
        found += parents
    return found


def living_descendants(pid: int) -> list[int]:
    """Return the living processes that descend from one; costs microseconds where the kernel lists children."""
    if not Path(f"/proc/{pid}/task/{pid}/children").exists():  # a kernel without this list
        return descendants(pid, living_processes())
    found = children = _children(pid)
    while children:
        children = [grandchild for child in children for grandchild in _children(child)]
        found = found + children
    return found


def _children(pid: int) -> list[int]:
    found = list[int]()
    for file in Path("/proc").glob(f"{pid}/task/*/children"):  # of each thread
        with contextlib.suppress(OSError):  # it has just ended
            found += map(int, file.read_text().split())
    return found


def tidies_up(pid: int) -> bool:
    """Return whether a process removes remains of others and then ends: it is not killed."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False  # it has ended
    return any(name in command for name in _TIDY)


def _left_behind(pid: int, mark: str) -> set[int]:
    """Return what lives of all that a child has started, now that it has ended (Linux).

    Those have a variable of this name, and lead a group or are in one; so is a process that has written another name
    over its variables, as `setproctitle` does in the processes of SGLang. Those that tidy up are let do so.
    """
    marked = set()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if f"{mark}=".encode() in file.read_bytes():
                marked.add(int(file.parent.name))
    living = living_processes()
    groups = {pid, *(living[one].group for one in marked & living.keys())} - {os.getpgrp()}
    left = marked | {one for one, process in living.items() if process.group in groups}
    return {one for one in left if not tidies_up(one)}


def name_of(pid: int) -> str:
    """Name of a process as the kernel has it; empty for one that ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process since its start; 0 if it ended or the kernel does not report them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))


def cpu_wait_s(pid: int) -> float:
    """Return the seconds for which the main thread of a process was ready and had no CPU; 0 if unknown.

    It is the one that sends the vital signs: others that wait do not excuse it. While it waits now it is counted up to
    when it ran last. Nothing is added while it sleeps or is stopped.
    """
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:  # the process is gone
        return 0.0


def state_of(pid: int) -> Literal["", "stopped", "gone"]:
    """Return the state of a process of this machine, where the kernel reports it (Linux)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "gone" if Path("/proc/self/stat").exists() else ""
    except OSError:
        return ""
    letter = stat.rsplit(")", 1)[1].split()[0]
    return "stopped" if letter in "Tt" else "gone" if letter == "Z" else ""


class ChildProcess:
    """A process that this one started, tied to it; signals to one that has ended are no error."""

    def __init__(
        self, process: asyncio.subprocess.Process, log: Path | None = None, logged: int = 0, mark: str = ""
    ) -> None:
        self.process = process
        self._mark = mark  # of all that it starts
        self._log = log  # holds its output, after the first `logged` bytes
        self._logged = logged

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        log: Path | None = None,
        piped: bool = False,
        environment: Mapping[str, str] | None = None,
        apart: bool = False,
        inherits: tuple[int, ...] = (),
    ) -> ChildProcess:
        """Start a process that the kernel kills when this one ends.

        Args:
            log: its output is appended to this file, readable only by its owner; none: to this process's output.
            piped: its errors go to a pipe, `process.stderr`, and its other output is dropped.
            environment: variables in addition to those of this process.
            apart: it leads a separate group without a terminal, so Ctrl-C does not reach it. It stays in the session:
                Linux divides cores between sessions, and nice values count within one alone (`sched(7)`, autogroup).
            inherits: file descriptors that stay open in it.
        """
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if log is not None else None
        logged = os.fstat(output).st_size if output is not None else 0
        mark = f"{_MARK}{secrets.token_hex(8)}"
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL if piped else output,
                stderr=asyncio.subprocess.PIPE if piped else output,
                env={**os.environ, **(environment or {}), mark: ""},
                preexec_fn=partial(_apart, os.getpid()) if apart else with_parent(),
                pass_fds=inherits,
            )
        finally:
            if output is not None:
                os.close(output)
        return cls(process, log, logged, mark)

    @property
    def pid(self) -> int:
        """Its number on this machine."""
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for the signal that ended it; None while it lives."""
        return self.process.returncode

    @property
    def stopped(self) -> bool:
        """Return whether it, or a process that it started, is stopped (Linux)."""
        return any(state_of(pid) == "stopped" for pid in (self.pid, *living_descendants(self.pid)))

    async def wait(self) -> int:
        """Wait until it has ended, and kill its remaining children; returns its exit code.

        Processes of a server that was killed while it started (SGLang's) live on: they do not know it yet.
        """
        code = await self.process.wait()
        mark, self._mark = self._mark, ""
        if mark and sys.platform != "linux":  # the group that it leads, if it does
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        killed = set[int]()
        while mark and (left := _left_behind(self.pid, mark) - killed):
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            killed |= left
        return code

    def terminate(self) -> None:
        """Ask it to leave."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                self.process.send_signal(number)

    async def end(self, within_s: float = 5.0) -> int:
        """Ask it to leave, kill it if it does not, and return its exit code."""
        self.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                return await self.wait()
        self.kill()
        return await self.wait()

    @property
    def last_lines(self) -> str:
        """The last lines of its log."""
        return log_tail(self._log, self._logged) if self._log is not None else "no output"

    @property
    def end_text(self) -> str:
        """Describe how it ended, with its last lines unless a signal ended it."""
        code = self.returncode
        return f"exit code {code}" if self._log is None or (code or 0) < 0 else f"exit code {code}: {self.last_lines}"


STACK_SIGNAL = signal.SIGUSR2  # an actor writes the stacks of its threads to its log
FATAL = 3  # exit code of an actor that another start cannot help
DENIED = 4  # and of one whose login the server refuses: it cannot publish that itself


_SETTLED = 15  # times `healthy_s`: a process that lived this long resets its count of deaths, with or without progress


class RestartPolicy:
    """Restart policy: how often in a row a process died soon after its start, and how long to wait."""

    def __init__(self, settings: SupervisionSettings) -> None:
        self.count = 0
        self._settings = settings
        self._began = time.monotonic()

    def add(self, *, killed: bool = False, worked: bool = True) -> None:
        """Note a death.

        Args:
            killed: by a signal from outside.
            worked: whether it achieved anything since its start.
        """
        lived_s = time.monotonic() - self._began
        settings = self._settings
        healthy = lived_s > _SETTLED * settings.healthy_s or (worked and (killed or lived_s > settings.healthy_s))
        self.count = 1 if healthy else self.count + 1

    @property
    def should_give_up(self) -> bool:
        """Return whether another start would only be another death."""
        return self.count >= self._settings.deaths

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next start."""
        return float(min(self._settings.restart_pause_s, 0.1 * 2**self.count))

    async def pause(self) -> None:
        """Wait before the next start, which follows at once; nothing announces that a cause of deaths has gone."""
        await asyncio.sleep(self.pause_s)
        self.begin()

    def begin(self) -> None:
        """Count the life of its process from now on."""
        self._began = time.monotonic()
