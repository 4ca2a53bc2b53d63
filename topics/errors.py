"""The root of all errors, in the package that every other one imports; `asyncrl.errors` exports it."""

from __future__ import annotations


class AsyncRLError(Exception):
    """Base of every error of asyncrl; the message names the object, the found value, the expected value, and the
    remedy."""

    exit_code = 1  # of the command that it ends
    fatal = False  # another start of the actor that it ends would end in the same way
