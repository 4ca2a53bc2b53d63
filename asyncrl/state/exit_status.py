"""How a run ended that no process holds any more, by its directory alone: no server is asked."""

from __future__ import annotations

from asyncrl.run.directory import RunFiles
from asyncrl.state.findings import finding
from asyncrl.state.health_checks import blockers
from asyncrl.state.run_state import RunState
from asyncrl.state.watch import disk_of
from topics.stalls import StallFound


def how_it_ended(files: RunFiles) -> tuple[str, list[StallFound]]:
    """Return the end of a run in one line, and the reason unless it was requested.

    Raises:
        OSError, DamagedFile: its settings cannot be read.
    """
    run, place = files.root.name, _place(files)
    if files.end == "finished":
        return f"ended as it should: it finished{place}", []
    if files.end == "stopped":
        return f"ended as it should: it was asked to stop{place}; to continue: asyncrl up --resume {run}", []
    if files.end == "not begun":
        return f"ended before it trained anything; to continue: asyncrl up --resume {run}", []
    state = RunState(run)
    state.disks = [disk_of(files.root)]
    if files.end == "failed":
        found = finding("run failed", run, f"it ended{place}: {files.failure.read_text(encoding='utf-8')}")
    else:
        found = finding("run killed", run, f"it ended{place}: no process of it is left, and none wrote why")
    return f"{files.end}{place}", [found, *blockers(state)]


def _place(files: RunFiles) -> str:
    """` at step 75 of 130`, by its metrics; empty for a run that only serves."""
    config, rows = files.read_config(), files.newest_steps()
    if not config.trains:
        return ""
    if not rows:
        return " before its first step"
    step = rows[-1]["step"]
    return f" at step {step:,} of {config.learner.steps:,}" if step > 0 else " in its warm-up"
