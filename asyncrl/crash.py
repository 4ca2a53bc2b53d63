"""Crash points: every place where a process can die between two effects has a name.

Tests and `asyncrl chaos` arm a point by a file; the first process of that role that passes it takes the file and ends
itself with SIGKILL, as a crash would. Without the environment variable a point costs one comparison.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NamedTuple

CRASH_FOLDER = "ASYNCRL_CRASH_FOLDER"  # environment variable: the folder that holds the files of armed points

_WORKERS = ("rollout", "reward", "evaluator")
_KEEPERS = ("prompter", "buffer", "learner", "warden")
_EVERYBODY = (*_KEEPERS, *_WORKERS, "engine")


class CrashPoint(NamedTuple):
    """A place between two effects."""

    name: str
    roles: tuple[str, ...]  # who passes it
    between: str  # what has happened, and what has not
    survivor: str  # what whoever comes next finds and does


POINTS: dict[str, CrashPoint] = {
    point.name: point
    for point in (
        CrashPoint(
            "publish.before",
            _EVERYBODY,
            "a message is made; nobody has it",
            "decides or works anew: nothing was said",
        ),
        CrashPoint(
            "publish.stored",
            _EVERYBODY,
            "the server has the message; its acknowledgement is not taken in",
            "finds it: a worker by its fence, a keeper by folding its log; a repeat has the same id or is refused",
        ),
        CrashPoint(
            "blob.inside",
            ("rollout", "buffer"),
            "some chunks of a large message are stored, its record is not",
            "says it anew under another blob id; the chunks without a record are never read",
        ),
        CrashPoint(
            "blob.stored",
            ("rollout", "buffer"),
            "all chunks are stored, the record that names them is not",
            "as above",
        ),
        CrashPoint(
            "work.received",
            _WORKERS,
            "work is leased, nothing is done",
            "gets it after the lease, as delivery 2",
        ),
        CrashPoint(
            "work.said",
            _WORKERS,
            "the result is stored, the work is not acknowledged",
            "gets it after the lease, finds the result (rollout) or says it again (late, and counted as such), and "
            "acknowledges",
        ),
        CrashPoint("work.acknowledged", _WORKERS, "the work is acknowledged", "has nothing to do"),
        CrashPoint(
            "progress.before",
            ("rollout",),
            "tokens are sampled beyond the newest progress",
            "goes on from the progress before: at most `rollout.progress_tokens` are sampled again",
        ),
        CrashPoint(
            "progress.stored", ("rollout",), "the progress is stored", "goes on from it: nothing is sampled again"
        ),
        CrashPoint(
            "keeper.claiming",
            _KEEPERS,
            "everything is folded, the log is not claimed",
            "claims it",
        ),
        CrashPoint(
            "keeper.claimed",
            _KEEPERS,
            "the log is claimed, nothing is decided",
            "claims it after this one; the newest claim counts",
        ),
        CrashPoint(
            "keeper.appended",
            _KEEPERS,
            "decisions are stored, and not read back",
            "folds them: they have taken effect",
        ),
        CrashPoint(
            "snapshot.taken",
            ("prompter", "buffer"),
            "what a keeper knows is written down, and not on its log",
            "starts from the snapshot before",
        ),
        CrashPoint(
            "snapshot.said",
            ("prompter", "buffer"),
            "a snapshot is on the log",
            "starts from it and folds what came after it",
        ),
        CrashPoint(
            "learner.stepped",
            ("learner",),
            "the optimiser has stepped, `batch.trained` is not said",
            "loads the newest checkpoint, trains the batches after it again without saying so, then this one, and says "
            "it once",
        ),
        CrashPoint(
            "learner.saving",
            ("learner",),
            "`batch.trained` is said, the checkpoint that is due is not begun",
            "trains the batches since the checkpoint before again, without saying so, and saves then",
        ),
        CrashPoint(
            "checkpoint.written",
            ("learner",),
            "a checkpoint is written aside, not renamed",
            "ignores it and writes it anew",
        ),
        CrashPoint(
            "checkpoint.renamed",
            ("learner",),
            "a checkpoint has its name, `checkpoint.saved` is not said",
            "does not count it; goes on from the one before",
        ),
        CrashPoint(
            "checkpoint.said",
            ("learner",),
            "`checkpoint.saved` is said, older ones are not removed",
            "goes on from it; older ones are removed later",
        ),
        CrashPoint(
            "trim.blobs_purged",
            ("warden",),
            "blobs are purged, the messages that name them are not",
            "finds them below the floor still, and purges both: nobody reads what is below it",
        ),
        CrashPoint(
            "trim.purged",
            ("warden",),
            "messages are purged, `stream.trimmed` is not said",
            "trims from where the stream begins now; the audit knows from checkpoints and ends what may be gone",
        ),
        CrashPoint(
            "prune.inside",
            ("warden",),
            "an old checkpoint or version is renamed aside, not removed",
            "removes it; nothing looks for it under that name",
        ),
        CrashPoint(
            "weights.written",
            ("learner",),
            "a version is written aside, not renamed",
            "writes it anew; nobody has heard of it",
        ),
        CrashPoint(
            "weights.renamed",
            ("learner",),
            "a version is in the store, `weights.published` is not said",
            "makes the same version, finds it in the store by its digest and says it",
        ),
        CrashPoint(
            "learner.exported",
            ("learner",),
            "the final model is exported, `training.finished` is not said",
            "keeps the model and says it",
        ),
        CrashPoint(
            "engine.updating",
            ("engine",),
            "`engine.updating` is said, the server has its old weights",
            "starts a server and loads the newest version; workers send nothing before `engine.ready`",
        ),
        CrashPoint(
            "engine.paused", ("engine",), "the server is emptied and paused", "starts another server; workers resume"
        ),
        CrashPoint(
            "engine.swapped",
            ("engine",),
            "the server has the new weights, `engine.ready` is not said",
            "as above",
        ),
        CrashPoint(
            "eval.answered",
            ("evaluator",),
            "every prompt is answered and graded, `eval.scored` is not said",
            "gets the evaluation after the lease and does it again",
        ),
        CrashPoint(
            "fleet.scaled",
            ("warden",),
            "`fleet.scaled` is said, nobody is started",
            "reads the fleet on its log and starts it",
        ),
        CrashPoint(
            "actor.started",
            ("warden",),
            "a process is started, nobody watches it",
            "the kernel ends the process with its warden; it is started anew",
        ),
    )
}

_folder = os.environ.get(CRASH_FOLDER, "")
_role = ""


def plays(role: str) -> None:
    """Say which role this process plays."""
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
    point = POINTS.get(name)
    if point is None or role not in point.roles:
        where = f"passed by {', '.join(point.roles)}" if point else f"expected one of {', '.join(POINTS)}"
        raise ValueError(f"crash point {name} for {role}: {where}")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}@{role}"
    file.touch()
    return file


def _crash(name: str) -> None:
    armed = Path(_folder, f"{name}@{_role}")
    try:
        armed.unlink()  # one of those who pass at once gets it
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
