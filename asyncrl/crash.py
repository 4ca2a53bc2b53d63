"""Crash points: every place where a process can die between two effects has a name.

Tests and `asyncrl chaos` arm a point by a file; the first process of that role that passes it takes the file and ends
itself with SIGKILL, as a crash would. Without the environment variable a point costs one comparison.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from topics.roles import KEEPERS, WORKERS

CRASH_FOLDER = "ASYNCRL_CRASH_FOLDER"  # environment variable: the folder that holds the files of armed points

_ALL_ROLES = (*KEEPERS, *WORKERS, "engine")

# Which roles pass which points; how the run recovers from a crash there is in docs/internals/delivery.md.
_PASSED: tuple[tuple[Sequence[str], str], ...] = (
    (_ALL_ROLES, "publish.before publish.stored"),
    (("rollout", "buffer"), "blob.inside blob.stored"),
    (WORKERS, "work.received work.published work.acknowledged"),
    (("rollout",), "progress.held progress.before progress.stored"),
    (KEEPERS, "keeper.claiming keeper.claimed keeper.appended snapshot.taken snapshot.published"),
    (("learner",), "learner.stepped learner.saving share.written"),
    (("learner",), "checkpoint.written checkpoint.renamed checkpoint.published"),
    (("supervisor",), "trim.announced trim.blobs_purged trim.purged prune.inside"),
    (("learner",), "weights.written weights.renamed learner.exported"),
    (("engine",), "engine.updating engine.paused engine.swapped"),
    (("learner",), "card.requested card.granted card.rested card.returned"),
    (("engine",), "card.emptied card.left card.taken"),
    (("supervisor",), "fleet.scaled actor.started"),
)
POINTS = {name: roles for roles, names in _PASSED for name in names.split()}

_folder = os.environ.get(CRASH_FOLDER, "")
_role = ""


def set_role(role: str) -> None:
    """Set the role of this process."""
    global _role
    _role = role


def crash_point(name: str) -> None:
    """End this process here, if the point is armed for its role."""
    if _folder:
        _crash(name)


def arm(folder: Path, name: str, role: str) -> Path:
    """Let the next process of a role that passes a point die there; the returned file is gone once it has.

    Raises:
        ValueError: no such point, or the role never passes it.
    """
    roles = POINTS.get(name, ())
    if role not in roles:
        where = f"passed by {', '.join(roles)}" if roles else f"expected one of {', '.join(POINTS)}"
        raise ValueError(f"crash point {name} for {role}: {where}")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}@{role}"
    file.touch()
    return file


def _crash(name: str) -> None:
    armed = Path(_folder, f"{name}@{_role}")
    try:
        armed.unlink()  # one of the processes that pass at once gets it
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
