"""The root of all errors, and those that belong to no package."""

from __future__ import annotations

import traceback

import msgspec

from topics.errors import AsyncRLError as AsyncRLError

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of bytes that are no JSON or MessagePack as they should be."""

_LINES = 8  # of a traceback


class WrongUsage(AsyncRLError):
    """A command line that means nothing."""

    exit_code = 2


class DamagedFile(AsyncRLError, ValueError):
    """A file whose content is damaged."""


class LaunchError(AsyncRLError):
    """A run that cannot start, or resume as requested."""


class FunctionError(AsyncRLError):
    """A user's function that cannot be found or loaded."""

    fatal = True


class EnvironmentFault(AsyncRLError):
    """A fault of the place where a rollout function works, such as a sandbox: the function runs again."""


def last_lines(error: BaseException, *, skip: int = 0) -> str:
    """The end of the traceback of `error`, without the outermost `skip` frames, which are ours."""
    trace = error.__traceback__
    for _ in range(skip):
        trace = trace.tb_next if trace and trace.tb_next else trace
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    text = text.encode(errors="backslashreplace").decode()  # half a pair, as from JSON, is in no message
    return "\n".join(text.splitlines()[-_LINES:])[-4000:]


def places(error: BaseException) -> list[str]:
    """Return where an error came from, the innermost last, without its words: those may quote what a user said."""
    frames = traceback.extract_tb(error.__traceback__)[-_LINES:]
    return [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
