"""Processes of tests, forked from one that has imported all they need: imports cost each several CPU seconds.

A fork server is a child of the process that it serves (`ForkServer`). It forks children of that process, not of
itself (`CLONE_PARENT`), with the command line and variables that they were started with. So parents, signals, groups,
exit codes and `/proc` are those of a real start. Each forked process has a fork server too, which is forked first.

`install` lets `subprocess` and `asyncio` fork what they can, and start the rest. Only Linux has these calls.
"""

import array
import asyncio
import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import multiprocessing.util
import os
import pickle
import pkgutil
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import weakref
from asyncio.subprocess import Process, SubprocessStreamProtocol
from asyncio.unix_events import _UnixSubprocessTransport
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.kernel_calls import fork_sibling, show_as

_PACKAGES = ("topics", "asyncrl", "actors")  # each module of them can be forked, and is imported in advance
_LEFT_OUT = ".megatron"  # it takes as long as all others, and few tests import it
_LIBRARIES = (
    "matplotlib.pyplot",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "uvloop",
)
_READ_AT_START = ("HF_", "LANG", "LC_", "LD_", "MKL", "MPL", "OMP_", "OPENBLAS", "PYTHON", "TORCH_")
"""Prefixes of variables that the interpreter and libraries read once: their values must be those of the server."""
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
_ORDER_BYTES = 1 << 20
_READY = b"ready"
_FILES = 64  # that an order may carry
_HIGH = 700  # where files of an order wait until their numbers are free

_fork_exec = subprocess._fork_exec  # type: ignore[attr-defined]
_create_subprocess_exec = asyncio.create_subprocess_exec


class Order(NamedTuple):
    """A process to be forked; its open files come with it."""

    command: list[str]
    folder: str
    environment: dict[str, str]
    files: list[int]  # their numbers in it
    group: int
    nice: int
    limits: list[tuple[int, int]]
    session: bool  # it leads one
    prepare: Any  # called first in it; None: nothing
    prepared: int  # file that is closed then


class ForkServer:
    """The server of this process."""

    def __init__(self, environment: Mapping[str, str], channel: socket.socket | None = None) -> None:
        self._environment = {**environment, "OMP_NUM_THREADS": "1"}  # of the server
        self._variables = _startup(self._environment)
        self._channel = channel  # None: it is not started
        self._lock = threading.Lock()
        self._ready = False

    def start(self) -> None:
        """Start it; it imports all while this process does other things."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = Path(__file__).parents[2]
        with its:
            code = f"import sys; sys.path[:0] = [{str(root / 'tests')!r}]; from harness.forks import main; main()"
            command = [sys.executable, "-P", "-c", code, str(its.fileno()), "harness.forks"]
            files = (its.fileno(),)
            subprocess.Popen(command, cwd=root, env=self._environment, stdin=subprocess.DEVNULL, pass_fds=files)
        self._channel = ours

    @property
    def ready(self) -> bool:
        """Return whether it has imported all; the first question starts it."""
        if self._channel is None and threading.current_thread() is threading.main_thread():  # it ends with its thread
            self.start()
        if not self._ready and self._channel is not None and select.select([self._channel], [], [], 0)[0]:
            self._ready = self._channel.recv(32) == _READY
        return self._ready

    def takes(self, command: list[str], environment: Mapping[str, str]) -> bool:
        """Return whether it can fork a process of this command."""
        program = command[3] if command[:2] == [sys.executable, "-P"] and len(command) > 3 else ""
        known = program.partition(".")[0] in _PACKAGES if command[2:3] == ["-m"] else "from actors" in program
        return known and self.ready and _startup(environment) == self._variables

    def fork(self, order: Order, files: list[int]) -> int:
        """Return the id of a new child of this process.

        Raises:
            ConnectionError: the server has ended.
        """
        assert self._channel is not None
        with self._lock:
            carried = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
            self._channel.sendmsg([pickle.dumps(order)], carried)
            answer = self._channel.recv(32)
        if not answer:
            raise ConnectionResetError("the fork server of this process has ended; its error is above")
        return int(answer)


_server: ForkServer | None = None


def install(server: ForkServer | None) -> None:
    """Let this process fork its children from now on where it can, or start all of them (None)."""
    global _server
    _server = server
    subprocess._fork_exec = _forked_or_started if server else _fork_exec  # type: ignore[attr-defined]
    asyncio.create_subprocess_exec = _create if server else _create_subprocess_exec  # type: ignore[assignment]


os.register_at_fork(after_in_child=lambda: install(None))  # the server is not its, but that of its parent


def installed() -> ForkServer | None:
    """Return the server that this process forks from."""
    return _server


def _startup(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}


def _forked_or_started(*given: Any) -> int:
    """Do what `fork_exec` of `_posixsubprocess` does."""
    command = [os.fsdecode(word) for word in given[0]]
    kept, folder, variables = given[3:6]
    reads, writes, errors = given[6], given[9], given[11]
    errpipe, session, process_group, prepare = given[13], given[15], given[16], given[21]
    pairs = [os.fsdecode(pair).split("=", 1) for pair in variables or ()]
    environment = dict(os.environ) if variables is None else dict(pairs)
    if not _server or not _server.takes(command, environment) or not _can_be_sent(prepare) or process_group != -1:
        return int(_fork_exec(*given))
    files = dict(zip(kept, kept, strict=True))  # `errpipe` among them: `Popen` waits until it is closed
    files |= {number: number if file < 0 else file for number, file in enumerate((reads, writes, errors))}
    limits = [resource.getrlimit(limit) for limit in _LIMITS]
    place = os.path.abspath(os.fsdecode(folder)) if folder else os.getcwd()
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    group = os.getpgrp()
    order = Order(command, place, environment, list(files), group, nice, limits, bool(session), prepare, errpipe)
    return _server.fork(order, list(files.values()))


def _can_be_sent(prepare: Any) -> bool:
    return prepare is None or (isinstance(prepare, functools.partial) and prepare.func.__module__ == "asyncrl.process")


async def _create(program: Any, *words: Any, stdin=None, stdout=None, stderr=None, limit=2**16, **options) -> Process:
    """Do what `asyncio.create_subprocess_exec` does, also in a loop of uvloop, which starts processes by itself."""
    command = [os.fsdecode(word) for word in (program, *words)]
    if not _server or not _server.takes(command, options.get("env") or os.environ):
        options |= {"stdin": stdin, "stdout": stdout, "stderr": stderr, "limit": limit}
        return await _create_subprocess_exec(program, *words, **options)
    loop = asyncio.get_running_loop()
    protocol = SubprocessStreamProtocol(limit=limit, loop=loop)
    waiter = loop.create_future()
    transport = _UnixSubprocessTransport(
        loop, protocol, command, False, stdin, stdout, stderr, 0, waiter=waiter, **options
    )
    watched = os.pidfd_open(transport.get_pid())

    def end() -> None:
        loop.remove_reader(watched)
        os.close(watched)
        transport._process_exited(transport._proc.wait())

    loop.add_reader(watched, end)
    await waiter
    return Process(transport, protocol, loop)


# --- in the server


def main() -> None:
    """Import all, and fork until the process that is served has ended."""
    from asyncrl.process import die_with

    parent = os.getppid()
    die_with(parent)
    channel = socket.socket(fileno=int(sys.argv[1]))
    del sys.path[0]  # which the first line has put there
    gc.disable()
    for package in map(importlib.import_module, _PACKAGES):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with contextlib.suppress(ImportError):  # of what is not installed
                if not module.name.endswith("__main__") and _LEFT_OUT not in module.name:
                    importlib.import_module(module.name)
    for name in _LIBRARIES:
        importlib.import_module(name)
    atexit._clear()  # what libraries do when they have imported much
    for function in (multiprocessing.util._exit_function, weakref.finalize._exitfunc):
        atexit.register(function)
    for kept in weakref.finalize._registry:  # type: ignore[attr-defined]
        kept.atexit = False
    gc.collect()
    gc.freeze()
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "a thread would be lost in each fork"
    _serve(channel)


def _serve(channel: socket.socket) -> None:
    """Fork until the process that is served has ended; returns only in a forked process, when its program has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that is served
    with contextlib.suppress(BrokenPipeError):  # it has ended; as in the loop
        channel.send(_READY)
    while True:
        data, carried = b"", list[Any]()
        with contextlib.suppress(ConnectionResetError):
            data, carried, _, _ = channel.recvmsg(_ORDER_BYTES, socket.CMSG_SPACE(_FILES * 4))
        if not data:
            os._exit(0)
        files = array.array("i", b"".join(rights for _, _, rights in carried)).tolist()
        pid = fork_sibling()
        if not pid:
            _become(pickle.loads(data), files)
        for file in files:
            os.close(file)
        with contextlib.suppress(BrokenPipeError):  # it has ended
            channel.send(str(pid).encode())


def _become(order: Order, files: list[int]) -> None:
    """Be the process of an order, in a process that was just forked."""
    code = 1
    try:
        _take_files(dict(zip(order.files, files, strict=True)))
        _take_place(order)
        if order.prepare is not None:
            order.prepare()
        os.close(order.prepared)
        _add_server(order)
        code = _ended(order.command)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _take_files(files: dict[int, int]) -> None:
    """Give open files their numbers, and close all others."""
    waiting = {number: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH) for number, file in files.items()}
    os.closerange(0, _HIGH)
    for number, file in waiting.items():
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, encoding=sys.stdin.encoding, closefd=False)
    sys.stdout = open(1, "w", encoding=sys.stdout.encoding, closefd=False)
    sys.stderr = open(2, "w", 1, encoding=sys.stderr.encoding, errors="backslashreplace", closefd=False)


def _take_place(order: Order) -> None:
    """Be where and what the process would be that had been started."""
    if order.session:
        os.setsid()
    elif os.getpgrp() != order.group:
        os.setpgid(0, order.group)
    os.setpriority(os.PRIO_PROCESS, 0, order.nice)
    for limit, both in zip(_LIMITS, order.limits, strict=True):
        resource.setrlimit(limit, both)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    show_as(order.command, order.environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv, sys.orig_argv = [order.command[2], *order.command[4:]], list(order.command)
    import numpy

    from asyncrl import crash

    numpy.random.seed()  # the other generators draw their seeds by themselves
    crash._folder = os.environ.get(crash.CRASH_FOLDER, "")  # which it has read when it was imported


def _add_server(order: Order) -> None:
    """Fork the fork server of this process, while it has one thread."""
    from asyncrl.process import die_with

    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork():
        its.close()
        install(ForkServer(order.environment, ours))
        return
    die_with(parent)
    number = fcntl.fcntl(its.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.closerange(0, _HIGH)
    for standard in range(3):
        os.open(os.devnull, os.O_RDWR)
        assert os.path.samefile(f"/proc/self/fd/{standard}", os.devnull)
    show_as(["harness.forks"], {})
    its.detach()
    _serve(socket.socket(fileno=number))


def _ended(command: list[str]) -> int:
    """Run `python -P -m MODULE WORDS`, or `-c CODE`, to its end; returns the exit code."""
    gc.enable()
    kind, program = command[2:4]
    try:
        if kind == "-m":
            sys.modules.pop(program, None)  # it is the main module now
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), main.__dict__)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        code = 130
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code & 0xFF
