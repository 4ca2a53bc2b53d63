"""What a person can mend."""

from __future__ import annotations


class Fault(Exception):
    """Something a person can mend; the message says what is wrong and what to do."""

    exit_code = 1  # of the command that it ends


class WrongUsage(Fault):
    """A command line that means nothing."""

    exit_code = 2


class DamagedFile(Fault, ValueError):
    """A file that does not hold what was written there."""
