"""A sandbox whose first process is `asyncrl.sandboxes.server`: the part of it that runs in the worker."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import random
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from asyncrl.config.sandbox_settings import PATH, SandboxCapability, SandboxSettings, sandbox_kind
from asyncrl.sandboxes.control_groups import ControlGroups
from asyncrl.sandboxes.output import ProgramOutput
from asyncrl.sandboxes.sandbox import ExecResult, FileRefused, Limit, OnOutput, SandboxError

_START_S, _END_S, _EMPTY_S = 60.0, 10.0, 5.0
_LEAVE_S = 1.0  # for its first process, which has nothing to save
_PACKET, _FD = 1 << 16, 4
_MB = 1_000_000
_NOT_STARTED: dict[int, Limit] = {errno.EAGAIN: "processes"}
_numbers = itertools.count(random.randrange(1 << 16))  # workers of a machine choose different cores


class _Answer(NamedTuple):
    argument: bytes
    fd: int = -1


class ServedSandbox:
    """A `Sandbox` of any kind on this machine."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._kind = sandbox_kind(settings.kind)
        self.capabilities: frozenset[SandboxCapability] = self._kind.capabilities()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: ControlGroups | None = None
        self._asked: dict[bytes, asyncio.Future[_Answer]] = {}
        self._names = itertools.count()
        self._errors = -1  # file in memory for what the first process complains of
        self._home, self._content, self._fault = "", "", "is not started"

    async def start(self) -> None:
        self._errors = os.memfd_create("errors")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        ready = self._asked[b""] = asyncio.get_running_loop().create_future()
        try:
            self._launch(theirs)
            theirs.close()  # so that the end of the process is seen here
            self._control = ours
            asyncio.get_running_loop().add_reader(ours, self._receive)
            async with asyncio.timeout(_START_S):
                await ready
            await self._fill()
        except (OSError, TimeoutError, SandboxError) as error:
            reason = self._complaint() or str(error) or f"it did not start within {_START_S:g} s"
            await self.destroy()
            raise SandboxError(f"a sandbox of kind {self._settings.kind} does not start: {reason}") from error
        except BaseException:
            await self.destroy()
            raise
        finally:
            theirs.close()
            if self._control is None:
                ours.close()

    def _launch(self, control: socket.socket) -> None:
        launch = self._kind.launch(self._settings)
        try:
            self._home, self._content = launch.home, launch.content
            memory_mb = self._settings.memory_mb + launch.shared_mb
            if launch.grouped:
                self._groups = ControlGroups.make(memory_mb=memory_mb, processes=self._settings.processes)
            entering = self._groups.entering() if self._groups is not None else []
            with _on_cores(self._settings.cores):
                self._process = subprocess.Popen(
                    [*entering, *launch.command],
                    stdin=control.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                    pass_fds=launch.fds,
                    env={"PATH": PATH},
                    cwd="/",
                    start_new_session=True,
                )
        finally:
            for fd in launch.fds:
                os.close(fd)

    async def _fill(self) -> None:
        """Copy the files that the workspace begins with.

        Raises:
            SandboxError: they cannot be copied, such as into a too small `disk_mb`.
        """
        if not self._content:
            return
        said: list[bytes] = []
        each = ["find", self._content, "-mindepth", "1", "-maxdepth", "1", "-exec", "cp", "-a", "{}", ".", ";"]
        result = await self.exec(each, on_output=lambda _stream, piece: said.append(piece))
        if result.code or said:
            raise SandboxError(f"its files of the image cannot be copied: {b''.join(said).decode(errors='replace')}")

    @property
    def process(self) -> int | None:
        """The number of its first process on the host, once it is started."""
        return None if self._process is None else self._process.pid

    @property
    def works(self) -> bool:
        """Return whether its first process runs."""
        return self._control is not None

    async def empty(self) -> bool:
        """End all programs and remove all files, for another use; returns whether nothing is left of this use."""
        try:
            asked = self._ask(b"empty", b"%d" % next(self._names))
            async with asyncio.timeout(_EMPTY_S):
                await asked
        except (OSError, TimeoutError, SandboxError):
            return False
        return True

    async def exec(
        self,
        command: Sequence[str],
        *,
        on_output: OnOutput,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        wall_s: float | None = None,
    ) -> ExecResult:
        settings, name = self._settings, b"%d" % next(self._names)
        variables = {"PATH": PATH, "HOME": self._home, **(environment or {})}
        words = [str(len(command)), *command, *(f"{key}={value}" for key, value in variables.items())]
        groups = self._groups
        killed = groups.killed() if groups is not None else 0
        output = ProgramOutput(on_output, settings.output_mb * _MB, lambda: self._tell(b"kill", name))
        given = [_file(b"\0".join([os.fsencode(word) for word in words]) + b"\0"), _file(stdin)]
        try:
            asked = self._ask(b"exec", name, fds=[*given, *output.fds])
        except BaseException:
            output.close()
            raise
        finally:
            for fd in (*given, *output.fds):
                os.close(fd)
        try:
            limit: Limit = ""
            done, _ = await asyncio.wait([asked], timeout=settings.wall_s if wall_s is None else wall_s)
            if not done:
                limit = "wall_s"
                self._tell(b"kill", name)
                await asyncio.wait([asked], timeout=_END_S)
            if not asked.done():
                raise SandboxError("a killed program did not end")
            code = int(asked.result().argument)
            output.finish()
        except OSError as error:
            on_output("stderr", f"{command[0]}: {os.strerror(error.errno or 0)}\n".encode())
            return ExecResult(127 if error.errno == errno.ENOENT else 126, _NOT_STARTED.get(error.errno or 0, ""))
        finally:
            self._asked.pop(name, None)
            output.close()
            if not asked.done():
                self._tell(b"kill", name)
        if not limit and code == -signal.SIGKILL and groups is not None and groups.killed() > killed:
            limit = "memory_mb"
        return ExecResult(code, "output_mb" if output.exceeded else limit)

    async def put(self, path: str, data: bytes, *, executable: bool = False) -> None:
        fd = await self._open(b"program" if executable else b"write", path)
        try:
            await asyncio.to_thread(_write, fd, data)
        except OSError as error:
            raise FileRefused(f"{path!r} cannot be written into a sandbox: {error}") from error
        finally:
            os.close(fd)

    async def get(self, path: str, *, most_bytes: int) -> bytes:
        fd = await self._open(b"read", path)
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode) or about.st_size > most_bytes:
                found = f"{about.st_size:,} bytes" if stat.S_ISREG(about.st_mode) else "another kind of file"
                expected = f"expected a regular file of at most {most_bytes:,} bytes"
                raise FileRefused(f"{path!r} in a sandbox: found {found}, {expected}")
            return await asyncio.to_thread(_read, fd, about.st_size)
        finally:
            os.close(fd)

    async def listen(self) -> socket.socket:
        answer = await self._ask(b"listen", b"%d" % next(self._names))
        listening = socket.socket(fileno=answer.fd)
        listening.setblocking(False)
        return listening

    async def destroy(self) -> None:
        self._lose("was destroyed")
        process, self._process = self._process, None
        groups, self._groups = self._groups, None
        if process is not None:
            try:
                await asyncio.to_thread(process.wait, _LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        if groups is not None:
            await groups.end()
        errors, self._errors = self._errors, -1
        if errors >= 0:
            os.close(errors)

    async def _open(self, what: bytes, path: str) -> int:
        parts = path.split("/")
        if not all(part not in ("", ".", "..") for part in parts) or "\0" in path:
            raise FileRefused(f"{path!r} leaves the workspace of a sandbox; expected a path like folder/file")
        try:
            return (await self._ask(what, b"%d" % next(self._names), os.fsencode(path))).fd
        except OSError as error:
            raise FileRefused(f"{path!r} in a sandbox cannot be opened: {os.strerror(error.errno or 0)}") from error

    def _ask(self, what: bytes, name: bytes, argument: bytes = b"", fds: Sequence[int] = ()) -> asyncio.Future[_Answer]:
        answer = self._asked[name] = asyncio.get_running_loop().create_future()
        try:
            if self._control is None:
                raise SandboxError(f"the sandbox {self._fault}")
            socket.send_fds(self._control, [b" ".join((what, name, argument))], fds)
        except OSError as error:
            self._lose(f"failed: {error}")
            raise SandboxError(f"the sandbox {self._fault}") from error
        except BaseException:
            del self._asked[name]
            raise
        return answer

    def _tell(self, what: bytes, name: bytes) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(b" ".join((what, name, b"")))

    def _receive(self) -> None:
        assert self._control is not None
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _PACKET, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._lose(f"failed: {self._complaint() or 'its first process ended'}")
            return
        what, name, argument = data.split(b" ", 2) if data != b"ready" else (data, b"", b"")
        asked = self._asked.pop(name, None)
        if asked is None or asked.done():
            for fd in fds:
                os.close(fd)
        elif what == b"failed":
            asked.set_exception(OSError(int(argument), ""))
        else:
            asked.set_result(_Answer(argument, fds[0] if fds else -1))

    def _complaint(self) -> str:
        return os.pread(self._errors, _PACKET, 0).decode(errors="replace").strip()[-500:] if self._errors >= 0 else ""

    def _lose(self, fault: str) -> None:
        """Close the socket, at which the sandbox ends; fail all requests."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
        self._control, self._fault = None, fault
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(SandboxError(f"the sandbox {fault}"))
                answer.exception()  # its task may be gone


@contextlib.contextmanager
def _on_cores(cores: int) -> Iterator[None]:
    """Let this thread, and processes that it starts meanwhile, run on some cores alone."""
    usable, first = sorted(os.sched_getaffinity(0)), next(_numbers) * cores
    os.sched_setaffinity(0, {usable[(first + number) % len(usable)] for number in range(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)


def _file(data: bytes) -> int:
    """A file in memory with these bytes, to be read from its start."""
    fd = os.memfd_create("asyncrl")
    _write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _read(fd: int, size: int) -> bytes:
    with open(fd, "rb", closefd=False) as file:
        return file.read(size)
