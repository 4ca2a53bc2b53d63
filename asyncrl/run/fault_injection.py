"""The processes of a run on this machine, found by its directory; and the faults that it recovers from, by signals."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple, Protocol

import psutil

from asyncrl.config.harness_settings import harness_name
from asyncrl.config.process_settings import PlacementSettings, placement_kind
from asyncrl.config.settings import Config
from asyncrl.config.tasks import every_task
from asyncrl.crash import POINTS
from asyncrl.errors import AsyncRLError
from asyncrl.run.directory import RunFiles
from topics.table import BUILT_IN, Tables

SERVER = "engine-server"  # the inference server that an engine started
RANK = "learner-rank"  # a process of the learner's trainer group
NATS = "nats"
SANDBOX = "sandbox"  # the first process of a sandbox of a rollout worker
PROGRAM = "program"  # a process in one, such as that of a harness
_SANDBOX_SERVERS = ("/asyncrl/server", "/sandboxes/server.py")  # ends of the path of its program
_SERVER_MODULES = ("asyncrl.engine.embedded", "sglang.launch_server", "vllm.entrypoints.cli.main")
_GUARD = "asyncrl.guard"  # the guard between an engine actor and a server that starts processes


class Part(NamedTuple):
    """A living process and its role in the run."""

    role: str  # of an actor, or one of the above
    name: str  # "rollout-2", "learner-1-rank0", "engine-1-server", "nats", "nats-3"
    process: psutil.Process


def parts(root: Path) -> list[Part]:
    """Return every living process with a role in the run of a directory, but for `asyncrl up`."""
    found, servers, guards = [], [], dict[int, int]()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended, or belongs to another user
            words = process.cmdline()
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if _GUARD in words:
                guards[process.pid] = process.ppid()
            elif not set(_SERVER_MODULES).isdisjoint(words):
                servers.append((process, process.ppid()))
            elif (file := _file_of(words)) is not None and file.resolve().is_relative_to(root.resolve()):
                found.append(_part(process, words, file))
    engines = {part.process.pid: part.name for part in found if part.role == "engine"}
    above = [(process, guards.get(parent, parent)) for process, parent in servers]
    found += [Part(SERVER, f"{engines[parent]}-server", process) for process, parent in above if parent in engines]
    return sorted(found, key=lambda part: part.name)


def sandboxed(root: Path) -> list[Part]:
    """Return the sandboxes of a run's rollout workers, and the living programs in them."""
    found: list[Part] = []
    for worker in (part for part in parts(root) if part.role == "rollout"):
        with contextlib.suppress(psutil.Error):  # it has just ended
            for first in filter(_is_sandbox, worker.process.children()):
                inside = [one for one in first.children(recursive=True) if not _is_sandbox(one)]
                found += [Part(PROGRAM, f"{worker.name}-program-{one.pid}", one) for one in inside]
                found.append(Part(SANDBOX, f"{worker.name}-sandbox-{first.pid}", first))
    return found


def _is_sandbox(process: psutil.Process) -> bool:
    try:
        return any(word.endswith(_SANDBOX_SERVERS) for word in process.cmdline())
    except psutil.Error:  # it has just ended
        return False


def _file_of(words: list[str]) -> Path | None:
    """Return the file in a run's directory that the command line of a process with a role names."""
    option = "-c" if words and Path(words[0]).name == "nats-server" else "--credentials"
    modules = ("actors.main", "actors.learner.rank_process")
    if option not in words[:-1] or (option == "--credentials" and set(modules).isdisjoint(words)):
        return None
    return Path(words[words.index(option) + 1])


def _part(process: psutil.Process, words: list[str], file: Path) -> Part:
    if "actors.main" in words:
        role, name = words[words.index("actors.main") + 1 :][:2]
        return Part(role, name, process)
    if "actors.learner.rank_process" in words:
        learner, rank = words[words.index("actors.learner.rank_process") + 1 :][:2]
        return Part(RANK, f"{learner}-rank{rank}", process)
    folder = file.parent.name  # of a cluster: "nats-2"
    return Part(NATS, folder if folder.startswith("nats-") else NATS, process)


SEVERAL = "several"  # two to four processes in the same instant
IN_A_ROW = 5  # faults of one role before it is left alone: its supervisor gives up at eight deaths in a row
_REST_S = 25.0  # longer than a supervisor's healthy start; progress is required too


class Target(NamedTuple):
    """A role and its fault."""

    role: str
    kind: str  # "kill", "freeze", "wake", or the name of a crash point

    @property
    def family(self) -> str:
        """`kill`, `freeze`, `wake` or `crash`."""
        return "crash" if self.kind in POINTS else self.kind

    def __str__(self) -> str:
        return f"{self.role}{'@' if self.family == 'crash' else ':'}{self.kind}"


class TargetError(AsyncRLError):
    """Unknown role, or the role does not support this fault."""


def signal_targets(tables: Tables = BUILT_IN) -> list[Target]:
    """Return every fault that a signal causes in a process which the run replaces by itself."""
    roles = (*tables.role_names, SERVER, RANK, NATS)
    found = [Target(role, "kill") for role in (*roles, SEVERAL)]
    return found + [Target(role, kind) for kind in ("freeze", "wake") for role in roles]


def parse_targets(text: str, known: Sequence[Target]) -> list[Target]:
    """The targets in a comma-separated list: `learner`, `nats:kill`, `engine@engine.swapped`, `@work.published`; all
    known ones if it is empty.

    Raises:
        TargetError: with the allowed targets.
    """
    found: list[Target] = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        role, _, kind = word.replace("@", ":").partition(":")
        fitting = [
            target
            for target in known
            if role in (target.role, "") and kind in (target.kind, "") and ("@" not in word or target.family == "crash")
        ]
        if not fitting:
            raise TargetError(f"--targets {word}: {_why_not(role, known)}")
        found += [target for target in fitting if target not in found]
    return found or list(known)


def _why_not(role: str, known: Sequence[Target]) -> str:
    if not role:
        kinds = dict.fromkeys(target.kind for target in known if target.family == "crash")
        return f"expected one of {', '.join(kinds)}" if kinds else "expected ROLE or ROLE:FAULT"
    of_role = [str(target) for target in known if target.role == role]
    if not of_role:
        roles = dict.fromkeys(target.role for target in known)
        return f"no role is called {role!r}; expected one of {', '.join(roles)}"
    return f"expected one of {', '.join(of_role)}"


def drawn(targets: Sequence[Target], seed: int) -> Iterator[Target]:
    """Targets without end: each family as often, and within a family each role, or each role at each crash point."""
    dice = random.Random(seed)
    families = sorted({target.family for target in targets})
    while True:
        family = dice.choice(families)
        yield dice.choice([target for target in targets if target.family == family])


class Rests:
    """Knows which roles rest after several faults in a row: until a while has passed and the run has trained a batch,
    so that its supervisor resets their count of deaths.
    """

    def __init__(self, root: Path) -> None:
        self._metrics = root / "metrics.jsonl"  # of the run; they grow with each batch that it trains
        self._rows: dict[str, _Row] = {}  # by role

    def note(self, role: str) -> None:
        """Note a fault."""
        row = self._row(role)
        self._rows[_supervised(role)] = _Row(1 if self._over(row) else row.faults + 1, time.monotonic(), self._size())

    def has(self, role: str) -> bool:
        """Return whether a role is to be left alone."""
        row = self._row(role)
        return row.faults >= IN_A_ROW and not self._over(row)

    def _row(self, role: str) -> _Row:
        return self._rows.get(_supervised(role), _Row())

    def _over(self, row: _Row) -> bool:
        return time.monotonic() - row.last_s >= _REST_S and self._size() > row.size

    def _size(self) -> int:
        return self._metrics.stat().st_size if self._metrics.exists() else 0


class _Row(NamedTuple):
    """Faults of a role in a row, the moment of the last one, and the size of the metrics then."""

    faults: int = 0
    last_s: float = 0.0
    size: int = 0


def _supervised(role: str) -> str:
    return "engine" if role == SERVER else role


def choose(role: str, living: Sequence[Part], dice: random.Random) -> list[Part]:
    """Draw a living process of a role, or for `several` two to four of any roles; none if there are too few."""
    if role == SEVERAL:
        return dice.sample(list(living), dice.randint(2, 4)) if len(living) > 4 else []
    fitting = [part for part in living if part.role == role]
    return [dice.choice(fitting)] if fitting else []


def inject(kind: str, chosen: Iterable[Part]) -> None:
    """Kill processes, or stop them until they are resumed."""
    for part in chosen:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended first
            part.process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def resume(part: Part) -> None:
    """Continue a stopped process."""
    with contextlib.suppress(psutil.NoSuchProcess):  # it was already replaced
        part.process.resume()


NODE = "node"


def node_targets(placement: PlacementSettings) -> list[Target]:
    """Return the faults of nodes, where the run has any."""
    return [Target(NODE, "kill")] if placement_kind(placement.kind).node_killer else []


def sandbox_targets(config: Config) -> list[Target]:
    """Return the faults of sandboxes, where the run has any."""
    uses = any(harness_name(task.rollout) for task in every_task(config))
    return [Target(SANDBOX, "kill"), Target(PROGRAM, "kill")] if uses else []


class NodeKiller(Protocol):
    """Kills nodes that run actors of a run; never the head, and never the last one."""

    async def kill(self) -> str:
        """Kill a node; returns its name, or "" if no node may be killed now."""


def open_node_killer(files: RunFiles, dice: random.Random) -> NodeKiller:
    """Open what kills nodes of a run that has some."""
    killer: NodeKiller = resolve_name(placement_kind(files.read_config().placement.kind).node_killer)(files, dice)
    return killer
