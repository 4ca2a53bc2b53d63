"""Leaving a command running without its terminal: started in the background, or when the terminal goes away."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from asyncrl.telemetry.output import print_lossy

_LAST_BYTES = 4000  # of the output, where the command ended before it was ready


def detached(output: Path, work: Callable[[Callable[[], None]], int]) -> tuple[bool, str]:
    """Do some work in a child process that outlives this one and its terminal.

    To be called while this process has one thread and no event loop.

    Args:
        output: file that takes what the child prints.
        work: is given a callback that reports readiness; returns the child's exit code.

    Returns:
        Whether it became ready, and its output if it ended before.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    if os.fork() == 0:
        os.close(reader)
        os.setsid()
        _redirect(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
        print_lossy()
        code = 1
        try:
            code = work(lambda: _report_ready(writer))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        ready = bool(pipe.read(1))
    return ready, "" if ready else output.read_bytes()[-_LAST_BYTES:].decode(errors="replace")


def on_hangup(stop: Callable[[], object]) -> None:
    """Stop in an orderly way when the terminal goes away, unless that is ignored (`nohup`)."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return

    def hang_up(*_: object) -> None:
        _redirect(os.open(os.devnull, os.O_WRONLY))  # output has no terminal any more
        stop()

    signal.signal(signal.SIGHUP, hang_up)


def _report_ready(writer: int) -> None:
    os.write(writer, b"1")


def _redirect(output: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
