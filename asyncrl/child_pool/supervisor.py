"""The supervisor of a child process: it ends the child and all its descendants.

It forks the child into a separate session and is the subreaper of all its descendants: a process that left its parents
and its session is reparented to the supervisor, not to init, and is found there. It stays until the last is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from asyncrl.child_pool import child as pool_child
from asyncrl.guard import adopt_orphans, end_like, has_ended, kill, woken_by
from asyncrl.process import descendants, die_with, living_processes

_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
_READ_BYTES, _WRITE_BYTES = 1 << 16, select.PIPE_BUF  # a pipe that takes anything takes as much at once
_OUTPUT_BYTES, _OUTPUT_BYTES_PER_S = 1 << 18, 1 << 14  # at once, and in the long run, of what functions print
_AGAIN_S = 0.01  # between two looks for processes that were started while others were killed


def main(parent: int, time_limit_s: float) -> None:
    """Fork the child, which returns from here; the supervisor ends this process as the child ended.

    Args:
        parent: the process that started this one; SIGTERM from it, or its death, ends everything.
        time_limit_s: how long a process may live after those that started it have gone.
    """
    adopt_orphans()
    wake, waker = woken_by(*_SIGNALS)
    die_with(parent, signal.SIGTERM)
    output, printed = os.pipe()
    own = os.getpid()
    child = os.fork()
    if child:
        for number in (0, 1, printed):
            os.close(number)
        end_like(_Supervisor(child, wake, output, time_limit_s).run())
    signal.set_wakeup_fd(-1)
    for sent in _SIGNALS:
        signal.signal(sent, signal.SIG_DFL)
    os.setsid()
    die_with(own)
    os.dup2(printed, 2)
    for number in (wake, waker, output, printed):
        os.close(number)
    pool_child.main()


class _Supervisor:
    """Waits for the end of the child, or for SIGTERM, and leaves no process."""

    def __init__(self, child: int, wake: int, output: int, time_limit_s: float) -> None:
        self._child = child
        self._wake = wake
        self._output = output
        self._orphan_s = max(1.0, time_limit_s)  # between two looks for processes without parents
        self._orphans: set[int] = set()
        self._allowed, self._counted_s = float(_OUTPUT_BYTES), time.monotonic()  # of the output
        self._left_out = 0

    def run(self) -> int:
        """Returns the wait status of the child."""
        look_at, sources = time.monotonic() + self._orphan_s, [self._wake, self._output]
        while True:
            ready = select.select(sources, [], [], max(0.0, look_at - time.monotonic()))[0]
            if self._output in ready and not self._relay():
                sources.remove(self._output)
            if self._wake in ready and (signal.SIGTERM in os.read(self._wake, _READ_BYTES) or has_ended(self._child)):
                return self._end_all()
            if time.monotonic() >= look_at:
                self._end_orphans()
                look_at = time.monotonic() + self._orphan_s

    def _end_orphans(self) -> None:
        """End those that lost their parents at least a time limit ago."""
        living, own = living_processes(), os.getpid()
        orphans = {pid for pid, process in living.items() if process.parent == own and pid != self._child}
        for pid in orphans & self._orphans:
            kill([pid, *descendants(pid, living)])
        self._orphans = orphans

    def _end_all(self) -> int:
        """Kill until there is nothing left to kill; returns the wait status of the child."""
        status = None
        while True:
            living = living_processes()
            found = descendants(os.getpid(), living)
            # A group is killed at once, with processes that are forked in it at that moment.
            groups = {living[pid].group for pid in found} | ({self._child} if status is None else set())
            for group in groups - {os.getpgrp()}:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            left = kill(found)
            while select.select([self._output], [], [], 0)[0] and self._relay():
                pass
            if not left:
                status = os.waitpid(self._child, 0)[1] if status is None else status
                if _reaped_all():
                    self._note_left_out()
                    return status
            select.select([self._wake], [], [], _AGAIN_S)

    def _relay(self) -> bool:
        """Pass on the output, up to its limit; False when no process is left that could print."""
        data = os.read(self._output, _READ_BYTES)
        now_s = time.monotonic()
        self._allowed = min(_OUTPUT_BYTES, self._allowed + (now_s - self._counted_s) * _OUTPUT_BYTES_PER_S)
        self._counted_s = now_s
        if len(data) <= self._allowed:
            self._note_left_out()
            self._allowed -= len(data)
            self._left_out += len(data) - _printed(data)
        else:
            self._left_out += len(data)
        return bool(data)

    def _note_left_out(self) -> None:
        if self._left_out:
            _printed(f"\n[{self._left_out} bytes of output left out]\n".encode())
            self._left_out = 0


def _printed(data: bytes) -> int:
    """Write to stderr without waiting; returns the number of written bytes."""
    written = 0
    with contextlib.suppress(OSError):  # the disk is full, or the reader is gone
        while written < len(data) and select.select([], [2], [], 0)[1]:
            written += os.write(2, data[written : written + _WRITE_BYTES])
    return written


def _reaped_all() -> bool:
    """Return whether no process is left under this one."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False
