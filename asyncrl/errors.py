"""User-facing errors."""

from __future__ import annotations


class AsyncRLError(Exception):
    """Base of all errors that a user can fix; the message states what is wrong and what to do."""

    exit_code = 1  # of the command that it ends


class WrongUsage(AsyncRLError):
    """A command line that means nothing."""

    exit_code = 2


class DamagedFile(AsyncRLError, ValueError):
    """A file that does not hold what was written there."""
