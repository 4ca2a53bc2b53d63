"""Names of what sandboxes make on a machine, and the end of what the sandboxes of a killed worker have left."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

_NAME = re.compile(r"asyncrl-sandbox-(\d+)-(\d+)-(\d+)-\d+")
_numbers = itertools.count()


def name_of_mine() -> str:
    """Return a new name, which tells whose it is: process namespace, process, and when the process started."""
    return f"asyncrl-sandbox-{_namespace()}-{os.getpid()}-{_started(os.getpid())}-{next(_numbers)}"


def is_left(name: str) -> bool:
    """Return whether a name is of a process of this namespace that has ended."""
    found = _NAME.fullmatch(name)
    return found is not None and found[1] == _namespace() and _started(int(found[2])) != found[3]


def _namespace() -> str:
    return "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))


def _started(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
