"""Runs a command, and ends with it or with the process that asked for it: then nothing of the command lives on.

A guard is a separate process, and the subreaper of all that the command starts (Linux). So it also finds and kills
processes whose parents have gone, that have their own session, or that wrote over their variables.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.process import descendants, die_with, living_processes, python, tidies_up, with_parent

_PR_SET_CHILD_SUBREAPER = 36
_READ_BYTES = 1 << 16
_BOOT = """
import sys
sys.path.insert(0, sys.argv[2])
from asyncrl.guard import main
main(int(sys.argv[3]), sys.argv[4:])
"""
_FOLDER = str(Path(__file__).resolve().parents[1])
_AGAIN_S = 0.01  # between two looks for processes that were started while others were killed


def guarded_python(*words: str) -> list[str]:
    """Return the command line of a guard of Python with these words, which a child of this process is to run.

    It finds this package even if the command has its own PYTHONPATH.
    """
    return python("-c", _BOOT, "asyncrl.guard", _FOLDER, str(os.getpid()), *python(*words))


def main(parent: int, command: Sequence[str]) -> None:
    """Run the command; this process ends as the command ended, after all of its processes.

    Args:
        parent: the process that started this one. SIGTERM from it goes to the command; its death ends everything.
    """
    adopt_orphans()
    wake, _ = woken_by(signal.SIGTERM, signal.SIGCHLD)
    die_with(parent, signal.SIGTERM)
    child = subprocess.Popen(command, preexec_fn=with_parent())  # noqa: PLW1509 - this process has one thread
    while not has_ended(child.pid):
        if signal.SIGTERM in os.read(wake, _READ_BYTES):
            if os.getppid() != parent:
                break
            child.terminate()
    while kill([pid for pid in descendants(os.getpid(), living_processes()) if not tidies_up(pid)]):
        if select.select([wake], [], [], _AGAIN_S)[0]:  # a child of it has ended
            os.read(wake, _READ_BYTES)
    end_like(os.waitpid(child.pid, 0)[1])


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents have gone, also of those that left their session."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def woken_by(*numbers: signal.Signals) -> tuple[int, int]:
    """Return both ends of a pipe, into which the number of each such signal is written, as a byte."""
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)  # its number comes through the pipe
    return wake, waker


def has_ended(child: int) -> bool:
    """Return whether a child has ended, which is not reaped yet: its number and group are not reused. Others are."""
    while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if found.si_pid == child:
            return True
        os.waitpid(found.si_pid, 0)
    return False


def kill(pids: Sequence[int]) -> list[int]:
    """Kill processes; returns those that could be."""
    killed = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or a program of another user
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return killed


def end_like(status: int) -> None:
    """End this process as another ended, by its wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core is enough
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
