"""The kind `bubblewrap`: private files, no network, and a file system in memory that ends with the sandbox.

Bubblewrap alone leaves five gaps. They are closed as follows:

- Processes of root have no process limit: a worker that is root starts bubblewrap as a user without rights.
- Links, pipes and large files in a workspace would mislead a reader on the host: the workspace is a file system in
  memory, which the host does not see. The first process opens files, without following links.
- A program with the setuid bit would be root's on the host: nothing of the workspace is on the host, and its file
  system ignores the bit.
- The kernel answers all system calls: a filter refuses those that no program of a task needs (`seccomp.py`).
- A memory limit holds for each process alone: a control group limits all of them, where the worker can make one.

The first process of a sandbox has number 1 in its process namespace. Programs cannot signal it, and its folder in
`/proc` is hidden from them, so they cannot end or change it.
"""

from __future__ import annotations

import os
import py_compile
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from asyncrl.config.finding import Finding
from asyncrl.config.sandbox_settings import PATH, Launch, SandboxCapability, SandboxKind, SandboxSettings
from asyncrl.sandboxes import server
from asyncrl.sandboxes.control_groups import group_parents
from asyncrl.sandboxes.seccomp import filter_program, has_filter

_MB = 1_000_000
_WORKSPACE = "/workspace"
_SERVER = "/run/asyncrl/server"  # Python tells by the content whether it is compiled
_TRIED_S = 20.0
_SHARED_MB = 64  # of /dev/shm
_FIRST_USER, _USERS = 1_900_000_000, 1 << 24  # numbers of users that no system gives away
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # folders next to /usr, or links into it
_LOOKUPS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl/certs", "/etc/localtime")
_TEXTS = {
    "/etc/passwd": "root:x:0:0::/:/bin/sh\nsandbox:x:1000:1000::/workspace:/bin/sh\n",
    "/etc/group": "root:x:0:\nsandbox:x:1000:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
}
_ALONE = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"),
    *("--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox", "--clearenv", "--setenv", "PATH"),
    *(PATH, "--setenv", "HOME", _WORKSPACE),
)


class Bubblewrap(SandboxKind):
    """A sandbox of the program `bwrap`."""

    def checks(self, settings: SandboxSettings) -> Iterator[Finding]:
        for path in settings.readable:
            if not Path(path).is_absolute():
                message = f'found "{path}", expected absolute paths: programs find the files at the same paths'
                yield Finding(("sandbox.readable",), message)

    def problem(self, settings: SandboxSettings) -> str:
        if absent := [path for path in settings.readable if not Path(path).exists()]:
            return f"this machine has no {absent[0]}, which sandbox.readable names; install it, or leave it out"
        if os.geteuid() == 0 and shutil.which("setpriv") is None:
            return "the worker is root and has no program `setpriv`, by which bubblewrap starts without its rights"
        return _fault_of_bubblewrap()

    def finds(self, program: str) -> bool:
        path = Path(program)
        if "/" in program and (not path.is_absolute() or path.is_relative_to(_WORKSPACE)):
            return True  # a file of the row, or of its setup
        return shutil.which(program, path=PATH) is not None

    def capabilities(self) -> frozenset[SandboxCapability]:
        given = set(SandboxCapability) - {SandboxCapability.IMAGES}
        return frozenset(given if group_parents() else given - {SandboxCapability.SHARED_MEMORY_LIMIT})

    def launch(self, settings: SandboxSettings) -> Launch:
        fds: list[int] = []
        try:
            given = [word for path, text in _texts().items() for word in ("--ro-bind-data", _pipe(text, fds), path)]
            given += ["--seccomp", _pipe(filter_program(), fds)]
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        memory, disk = settings.memory_mb * _MB, settings.disk_mb * _MB
        limits = [f"DATA={memory}", f"FSIZE={disk}", f"NPROC={settings.processes}"]
        python = _python()
        files = [*_system(), *_bound(_libraries_of(python)), *given, *_memory(disk, settings.readable, settings.links)]
        program = [shutil.which("bwrap") or "bwrap", *_ALONE, *files]
        command = [*program, "--", python, "-I", "-S", _SERVER, _WORKSPACE, *limits]
        return Launch([*_without_rights(), *command], _WORKSPACE, tuple(fds), settings.disk_mb)


@cache
def _texts() -> dict[str, bytes]:
    return {_SERVER: _program(), **{path: text.encode() for path, text in _TEXTS.items()}}


def _program() -> bytes:
    """Return the program of the first process, compiled if the Python that runs it has the version of ours."""
    major, minor, *_ = sys.version_info
    if Path(_python()).resolve().name != f"python{major}.{minor}":
        return Path(server.__file__).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        compiled = py_compile.compile(server.__file__, f"{folder}/compiled", doraise=True)
        return Path(compiled or "").read_bytes()


def _pipe(data: bytes, fds: list[int]) -> str:
    """Write data into a new pipe, and add its other end to `fds`."""
    reads, writes = os.pipe()
    fds.append(reads)
    with open(writes, "wb") as file:
        file.write(data)
    return str(reads)


def _system() -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for name in _SYSTEM:
        path = Path("/", name)
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    for name in _LOOKUPS:
        yield from ("--ro-bind-try", name, name)


def _bound(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        yield from ("--ro-bind", path, path)


def _memory(disk: int, readable: Sequence[str] = (), links: Mapping[str, str] | None = None) -> list[str]:
    """The file systems in memory, and all else read-only, also what is readable of the host's `/tmp`.

    The folder of the first process in /proc is hidden.
    """
    hidden = ("--proc", "/proc", "--size", "4096", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1")
    devices = ("--dev", "/dev", "--size", str(_SHARED_MB * _MB), "--tmpfs", "/dev/shm", "--remount-ro", "/dev")
    files = ("--size", str(disk), "--tmpfs", _WORKSPACE, "--size", str(disk), "--tmpfs", "/tmp")
    linked = [word for path, to in (links or {}).items() for word in ("--symlink", f"{_WORKSPACE}/{to}", path)]
    return [*hidden, *devices, *files, *_bound(readable), *linked, "--remount-ro", "/"]


def _without_rights() -> list[str]:
    """Return the words before a command of root's that starts as a user without rights."""
    if os.geteuid() != 0:
        return []
    user = _FIRST_USER + secrets.randbelow(_USERS)
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]


@cache
def _python() -> str:
    """Return a Python that every user may run; ours may be in the home of root."""
    ours = str(Path(sys.executable).resolve())
    return next((path for path in (ours, "/usr/bin/python3") if _is_public(Path(path))), ours)


def _is_public(path: Path) -> bool:
    return os.geteuid() != 0 or (path.exists() and all(folder.stat().st_mode & 0o001 for folder in path.parents))


def _libraries_of(python: str) -> list[str]:
    prefix = str(Path(python).parents[1])
    return [] if prefix == "/usr" or prefix.startswith("/usr/") else [prefix]


@cache
def _fault_of_bubblewrap() -> str:
    """Return why bubblewrap starts no program here; empty if it does."""
    if shutil.which("bwrap") is None:
        return "there is no program `bwrap` (Debian and Ubuntu: apt-get install bubblewrap)"
    if not has_filter():
        return "there is no filter of system calls for this processor"
    command = [*_without_rights(), "bwrap", *_ALONE, *_system(), *_bound(_libraries_of(_python())), *_memory(_MB)]
    tries = ["--", _python(), "-I", "-S", "-c", ""]
    try:
        tried = subprocess.run([*command, *tries], check=False, capture_output=True, timeout=_TRIED_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not start: {error}"
    said = tried.stderr.decode(errors="replace").strip()
    return f"bubblewrap does not start: {said[-300:] or f'exit code {tried.returncode}'}" if tried.returncode else ""


KIND = Bubblewrap()
