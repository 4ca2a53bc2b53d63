"""The first process of a sandbox: starts programs, opens files and listens, as the worker asks through a socket.

Each request is one packet, with open files where it needs them; so is each answer. The worker reads the output of
programs from pipes of its own, so no output passes through here. Once the worker has closed the socket, this process
ends all processes that it has started, and ends.

A Python without site packages runs this file as a script. Its imports are built in, because imports take most of the
time of a start.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # `signal` also imports `enum`, which takes longer than all the rest
import _socket
import errno
import posix as os  # `os` itself takes longer
import resource
import select
import sys

_FD = 4  # bytes of a number of an open file
_CONTROL, _PACKET = 0, 1 << 16
_DUMPABLE, _SECCOMP, _SUBREAPER = 4, 22, 36  # of prctl
_FILTER_MODE, _INSTRUCTION = 2, 8  # of seccomp; bytes
_LIFELINE = 1  # in a container: a connection to the machine of the worker


class _Server:
    def __init__(self, folders: tuple[str, ...], *, fetched: bool = False) -> None:
        self._folders = folders  # that programs can write
        self._fetched = fetched  # whether the control socket came by a lifeline
        self._control = _socket.socket(fileno=_CONTROL)
        self._running: dict[int, bytes] = {}  # requests by process
        self._woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Answer requests until the worker closes the socket."""
        polled = select.poll()
        polled.register(_CONTROL, select.POLLIN)
        polled.register(self._woken, select.POLLIN)
        if self._fetched:
            polled.register(_LIFELINE, select.POLLIN)
        self._control.send(b"ready")
        while True:
            for fd, _ in polled.poll():
                if fd == self._woken:
                    os.read(self._woken, _PACKET)
                elif fd == _LIFELINE or not self._take():
                    return
            self._reap()

    def _take(self) -> bool:
        try:
            data, ancillary, _, _ = self._control.recvmsg(
                _PACKET, _socket.CMSG_SPACE(4 * _FD), _socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            return False
        if not data:
            return False
        content = b"".join(part for _, _, part in ancillary)
        fds = [int.from_bytes(content[at : at + _FD], sys.byteorder) for at in range(0, len(content), _FD)]
        what, name, argument = data.split(b" ", 2)
        try:
            self._do(what, name, argument, fds)
        except OSError as error:
            self._answer(b"failed", name, b"%d" % (error.errno or 0))
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _do(self, what: bytes, name: bytes, argument: bytes, fds: list[int]) -> None:
        if what == b"exec":
            self._exec(name, *fds)
        elif what == b"kill":
            self._kill(name)
        elif what == b"empty":
            self._empty()
            self._answer(b"emptied", name, b"")
        elif what == b"listen":
            listening = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
            try:
                listening.bind(("127.0.0.1", 0))
                listening.listen(128)
                self._answer(b"opened", name, b"", listening.fileno())
            finally:
                listening.close()
        else:
            opened = _open_to_read(argument) if what == b"read" else _open_to_write(argument, what == b"program")
            try:
                self._answer(b"opened", name, b"", opened)
            finally:
                os.close(opened)

    def _exec(self, name: bytes, content: int, stdin: int, stdout: int, stderr: int) -> None:
        count, *words = _read(content).split(b"\0")[:-1]
        streams = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate((stdin, stdout, stderr))]
        environment = dict(word.split(b"=", 1) for word in words[int(count) :])
        ignored = [_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGINT, _signal.SIGTERM]  # by Python, and by `_main`
        arguments = words[: int(count)]
        process = os.posix_spawnp(
            arguments[0], arguments, environment, file_actions=streams, setsid=True, setsigdef=ignored
        )
        self._running[process] = name

    def _empty(self) -> None:
        """End all other processes, and remove what they can have left.

        Raises:
            OSError: something is left.
        """
        self._running.clear()
        _end_children()
        for path in self._folders:
            os.chmod(path, 0o755)
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                _empty_folder(folder)
            finally:
                os.close(folder)
        if os.getpid() == 1 and any(_lines_of(f"/proc/sysvipc/{kind}") > 1 for kind in ("shm", "sem", "msg")):
            raise OSError(errno.EBUSY, "shared memory, semaphores or queues are left")

    def _kill(self, name: bytes) -> None:
        for process, running in self._running.items():
            if running == name:
                _kill_group(process)

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            name = self._running.pop(ended.si_pid, None)
            if name is not None:
                _kill_group(ended.si_pid)  # before its number is free
            _, status = os.waitpid(ended.si_pid, 0)
            if name is not None:
                self._answer(b"ended", name, b"%d" % os.waitstatus_to_exitcode(status))

    def _answer(self, what: bytes, name: bytes, argument: bytes, fd: int | None = None) -> None:
        files = []
        if fd is not None:
            files = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fd.to_bytes(_FD, sys.byteorder))]
        self._control.sendmsg([b" ".join((what, name, argument))], files)


def _kill_group(process: int) -> None:
    try:
        os.killpg(process, _signal.SIGKILL)
    except ProcessLookupError:
        pass


def _kill_all() -> None:
    """Kill all other processes of this namespace."""
    try:
        os.kill(-1, _signal.SIGKILL)
    except ProcessLookupError:
        pass


def _lines_of(path: str) -> int:
    with open(path, "rb") as file:
        return file.read().count(b"\n")


def _empty_folder(folder: int) -> None:
    """Remove the content and the extended attributes of a folder, without following links."""
    for name in os.listxattr(folder):
        if name.startswith("user."):
            os.removexattr(folder, name)
    for name in os.listdir(folder):
        try:
            os.unlink(name, dir_fd=folder)
        except IsADirectoryError:
            os.chmod(name, 0o700, dir_fd=folder)  # no process is left that could put a link there
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            try:
                _empty_folder(below)
            finally:
                os.close(below)
            os.rmdir(name, dir_fd=folder)


def _read(fd: int) -> bytes:
    data = b""
    while piece := os.pread(fd, 1 << 20, len(data)):
        data += piece
    return data


def _folder_of(path: bytes, *, made: bool) -> tuple[int, bytes]:
    """Open the folder of a path below the workspace, without following links; returns it and the last part."""
    *parents, last = path.split(b"/")
    folder = os.open(b".", os.O_RDONLY | os.O_DIRECTORY)
    for part in parents:
        try:
            if made:
                try:
                    os.mkdir(part, dir_fd=folder)
                except FileExistsError:
                    pass
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        finally:
            os.close(folder)
        folder = below
    return folder, last


def _open_to_read(path: bytes) -> int:
    folder, last = _folder_of(path, made=False)
    try:
        return os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)


def _open_to_write(path: bytes, executable: bool) -> int:
    folder, last = _folder_of(path, made=True)
    try:
        try:
            os.unlink(last, dir_fd=folder)
        except FileNotFoundError:
            pass
        mode = 0o755 if executable else 0o644
        return os.open(last, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode, dir_fd=folder)
    finally:
        os.close(folder)


def _limit(limits: dict[str, str]) -> None:
    """Limit this process and those that it starts, by the names of limits."""
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # a limit of 0 does not hold where a program takes the dumps
    resource.setrlimit(resource.RLIMIT_MSGQUEUE, (0, 0))  # a queue can outlive its process and has no place in a folder
    for name, text in limits.items():
        kind, number = getattr(resource, f"RLIMIT_{name}"), int(text)
        most = resource.getrlimit(kind)[1]
        number = number if most == resource.RLIM_INFINITY else min(number, most)
        resource.setrlimit(kind, (number, number))


def _adopt() -> None:
    """Become the parent of processes whose parent ends, so that they end with this process."""
    _prctl(_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _filter_calls(program: bytes) -> None:
    """Let the kernel refuse calls of this process and of those that it starts, by a filter as `seccomp.py` makes it."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

    about = Program(len(program) // _INSTRUCTION, program)
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_SECCOMP, _FILTER_MODE, ctypes.byref(about), 0, 0):
        raise OSError(ctypes.get_errno(), "the filter of system calls is refused")


def _fetch_control(path: str) -> None:
    """Take the control socket from a named socket, and hide this process from programs of the same user."""
    _prctl(_DUMPABLE, 0)
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(path)
    _, ancillary, _, _ = connection.recvmsg(16, _socket.CMSG_SPACE(_FD), _socket.MSG_CMSG_CLOEXEC)
    [(_, _, content)] = ancillary
    os.dup2(int.from_bytes(content[:_FD], sys.byteorder), _CONTROL)
    os.dup2(connection.detach(), _LIFELINE)


def _end_children() -> None:
    while True:
        if os.getpid() == 1:
            _kill_all()
        else:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                for process in file.read().split():
                    os.kill(int(process), _signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _main(workspace: str, *words: str) -> None:
    """Serve in a workspace. Outside a process namespace, end all children and remove the workspace at the end.

    Args:
        words: limits, NAME=NUMBER each; in a container also socket=PATH, from which the control socket comes, and
            filter=HEX, a filter of system calls.
    """
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    _signal.signal(_signal.SIGTERM, _signal.SIG_IGN)
    os.chdir(workspace)
    given = dict(word.split("=", 1) for word in words)
    path, program = given.pop("socket", ""), given.pop("filter", "")
    if path:
        _fetch_control(path)
    _limit(given)
    if program:
        _filter_calls(bytes.fromhex(program))
    if os.getpid() == 1:
        _Server((workspace, "/tmp", "/dev/shm"), fetched=bool(path)).serve()
        return
    _adopt()
    try:
        _Server((workspace,)).serve()
    finally:
        _end_children()
        import shutil

        os.chdir("/")
        shutil.rmtree(workspace, ignore_errors=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
    os._exit(0)  # the end of the interpreter takes a fifth of the time of its start
