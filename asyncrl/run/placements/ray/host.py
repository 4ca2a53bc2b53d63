"""A host in a bundle: keeps received files, starts one actor process, forwards its output, and knows its end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import platform
import secrets
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from asyncrl.files import write_private
from asyncrl.locks import lock, take
from asyncrl.process import ChildProcess, living_descendants, python
from topics.roles import role_of

_POLL_S = 0.2
_ANSWER_S = 10.0  # after which a call that waits for news is answered without
_MOST = 1 << 20  # bytes of output in one answer


class Installed(NamedTuple):
    """Versions by which a host runs actors."""

    python: str
    asyncrl: str  # "" if it is not installed

    def __str__(self) -> str:
        return f"{f'asyncrl {self.asyncrl}' if self.asyncrl else 'no asyncrl'} on Python {self.python}"


def installed() -> Installed:
    """Return what this process runs with."""
    return Installed(platform.python_version(), importlib.metadata.version("asyncrl"))


class News(NamedTuple):
    """The output of a process since the last answer, and its exit code if it has ended."""

    output: dict[str, bytes]  # by the name of the log
    code: int | None


class Host:
    """The folder of one role on a node, and the process that runs there."""

    def __init__(self, folder: str, run: str, node: str, actor_id: str, address: str) -> None:
        """
        Args:
            folder: on this host, with all received files.
            run: names the run among those whose processes come here.
            node: names the node; one machine may have several.
            actor_id: of the process; those of one role share a folder.
            address: IP address of this host.
        """
        self._folder = Path(folder).expanduser().absolute()
        self._actor_id = actor_id
        self.home = self._folder / "runs" / run / node / role_of(actor_id)
        self._address = address
        self._process: ChildProcess | None = None
        self._ending: asyncio.Task[int] | None = None
        self._sent: dict[str, int] = {}  # bytes of each log that were sent on
        self._locks: list[int] = []
        self._copies: dict[str, int] = {}  # of models that are being made here, with the handle that has the lock

    async def prepare(self) -> tuple[str, str, Installed]:
        """Make the folder, private to its owner, and remove those that no host uses any more.

        Returns:
            The folder, the address of this host, and what actors run with here.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{self._folder} belongs to another user; name another with placement.folder")
        with self._alone():  # else one is removed between its making and its lock
            for name in ("logs", "credentials", "base"):
                (self.home / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._locks.append(lock(self.home / "lock", shared=True))
            for other in (self._folder / "runs").glob("*/*/*/lock"):
                if other.parent != self.home and _is_free(other):
                    shutil.rmtree(other.parent, ignore_errors=True)
            for other in (self._folder / "models").glob(".*.lock"):
                if _is_free(other):  # its maker was killed
                    self._remove_copy(other.name.removesuffix(".lock"))
        self._sent = {path.name: path.stat().st_size for path in self._logs()}
        return str(self.home), self._address, installed()

    async def keep(self, name: str, content: bytes) -> None:
        """Write a file below the folder, readable by its owner alone."""
        path = self.home / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, content)

    async def has_model(self, name: str) -> bool:
        """Return whether a copy of a model is on this host, and let it be the one of this folder."""
        model = self._folder / "models" / name
        if not model.is_dir():
            return False
        aside = self.home / f".model-{secrets.token_hex(4)}"
        aside.symlink_to(model)
        aside.replace(self.home / "model")
        return True

    async def write(self, copy: str, file: str, content: bytes) -> None:
        """Add bytes to a file of a copy of a model that is being made."""
        path = self._folder / "models" / f".{copy}" / file
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if copy not in self._copies:
            with self._alone():
                self._copies[copy] = lock(path.parent.with_name(f".{copy}.lock"), shared=True)
        try:
            with path.open("ab") as out:
                out.write(content)
        except OSError:  # the disk is full: no process continues with this copy
            os.close(self._copies.pop(copy))
            self._remove_copy(f".{copy}")
            raise

    async def finish_model(self, copy: str, name: str) -> None:
        """Give a copy of a model its name; where another host of this machine was first, its copy stays."""
        aside = self._folder / "models" / f".{copy}"
        with contextlib.suppress(OSError):
            aside.rename(self._folder / "models" / name)
        os.close(self._copies.pop(copy))
        self._remove_copy(aside.name)
        await self.has_model(name)

    async def start(self, module: str, words: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start the process, which the kernel kills when this host ends; returns its process id."""
        environment = {"OMP_NUM_THREADS": "1", **environment}
        file = self.home / "logs" / f"{self._actor_id}.log"
        self._process = await ChildProcess.start(python("-m", module, *words), log=file, environment=environment)
        self._ending = asyncio.create_task(self._process.wait())
        return self._process.pid

    async def news(self) -> News:
        """Return what the process printed, as soon as there is something, or it has ended."""
        assert self._ending is not None
        until = asyncio.get_running_loop().time() + _ANSWER_S
        while True:
            code = self._ending.result() if self._ending.done() else None
            output = self._output()
            if output or code is not None or asyncio.get_running_loop().time() > until:
                return News(output, None if output else code)  # the code comes with the last of the output
            await asyncio.wait({self._ending}, timeout=_POLL_S)  # no event announces that a log grew

    async def signal(self, number: int) -> None:
        """Send a signal to the process."""
        if self._process is not None:
            self._process.send_signal(number)

    def close(self) -> None:
        """Release the folder, as the end of this process does."""
        for handle in (*self._locks, *self._copies.values()):
            os.close(handle)
        self._locks.clear()
        self._copies.clear()

    async def end_node(self) -> None:
        """Kill all of this node at once, as the end of its machine would: for tests of what follows from it."""
        raylet = os.getppid()
        others = [pid for pid in living_descendants(raylet) if pid != os.getpid()]
        for pid in (raylet, *others, os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has just ended

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other hosts of this machine from looking for unused features."""
        turn = lock(self._folder / "lock")
        try:
            yield
        finally:
            os.close(turn)

    def _remove_copy(self, name: str) -> None:
        """Remove what there is of a copy of a model, then its lock."""
        shutil.rmtree(self._folder / "models" / name, ignore_errors=True)
        (self._folder / "models" / f"{name}.lock").unlink(missing_ok=True)

    def _logs(self) -> list[Path]:
        return sorted((self.home / "logs").glob(f"{self._actor_id}.*log"))

    def _output(self) -> dict[str, bytes]:
        found = {}
        for path in self._logs():
            with path.open("rb") as file:
                file.seek(self._sent.get(path.name, 0))
                if content := file.read(_MOST):
                    found[path.name] = content
                    self._sent[path.name] = file.tell()
        return found


def _is_free(path: Path) -> bool:
    """Return whether no host uses what a file is the lock of: those that do share it."""
    if (handle := take(path)) is None:
        return False
    os.close(handle)
    return True
