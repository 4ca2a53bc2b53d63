"""`asyncrl explain`: the history of one trajectory, from the issue of its prompt to its end."""

from __future__ import annotations

import argparse
import asyncio
import re

from rich.console import Console

from asyncrl.bus.connection import Bus
from asyncrl.bus.listen import read_log
from asyncrl.cli.options import add_run
from asyncrl.cli.reach import reached
from asyncrl.cli.samples import local_directory, sample_reader, sample_text
from asyncrl.errors import WrongUsage
from asyncrl.run.connect import RunNotFound
from asyncrl.state.history import TrajectoryHistory
from asyncrl.telemetry.samples import Sample, SamplesFile
from topics.actors import RUN_OPENED
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.evals import EVAL_SCORED
from topics.groups import GROUP_DROPPED
from topics.prompts import PROMPT_ISSUED
from topics.topic import ACTORS, BATCHES, GRADES, PROMPTS, TRAINING, TRAJECTORIES
from topics.trajectories import (
    PROGRESS_STORED,
    TRAJECTORY_DROPPED,
    TRAJECTORY_FAILED,
    TRAJECTORY_GENERATED,
    TRAJECTORY_GRADED,
    TRAJECTORY_PROGRESSED,
)

_ID = re.compile(r"([prwe]\d{6,})-\d+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_run(parser)
    parser.add_argument("trajectory", metavar="TRAJECTORY", help="such as p000042-3: member 3 of the group of a prompt")


def run(arguments: argparse.Namespace) -> int:
    """Read what was published about it, and print it in order of time."""
    if _ID.fullmatch(arguments.trajectory) is None:
        raise WrongUsage(f"{arguments.trajectory!r} is no trajectory; they are called as p000042-3 is")
    history, sample = asyncio.run(_read(arguments))
    print(history_text(history))
    if sample is not None:
        Console(highlight=False, soft_wrap=True).print(sample_text(sample))
    return 0


async def read_history(bus: Bus, trajectory_id: str) -> TrajectoryHistory:
    """Read the whole history of one trajectory from a run's topics.

    Raises:
        RunNotFound: there is no message about it.
    """
    run, prompt_id = bus.run, trajectory_id.rsplit("-", 1)[0]
    history = TrajectoryHistory(trajectory_id)
    progress = [topic.subject(run, trajectory_id) for topic in (TRAJECTORY_PROGRESSED, TRAJECTORY_GENERATED)]
    claims = [topic.subject(run, trajectory_id) for topic in (TRAJECTORY_GRADED, TRAJECTORY_FAILED)]
    drops = [TRAJECTORY_DROPPED.subject(run, trajectory_id), GROUP_DROPPED.subject(run, prompt_id)]
    await read_log(bus, ACTORS, [RUN_OPENED.subject(run)], history)
    await read_log(bus, PROMPTS, [PROMPT_ISSUED.subject(run, trajectory_id)], history, headers_only=True)
    await read_log(bus, TRAJECTORIES, progress, history, headers_only=True)
    if history.logs:
        await read_log(bus, TRAJECTORIES, [PROGRESS_STORED.subject(run, log) for log in sorted(history.logs)], history)
    await read_log(bus, GRADES, claims, history)
    if not history.events():
        raise RunNotFound(f"run {run}: there is no message about a trajectory {trajectory_id}")
    await read_log(bus, BATCHES, [*drops, BATCH_PACKED.subject(run), EVAL_SCORED.subject(run)], history)
    await read_log(bus, TRAINING, [BATCH_TRAINED.subject(run)], history)
    return history


def history_text(history: TrajectoryHistory) -> str:
    """Seconds since the run began, what was published, where it stands, one a line."""
    events = history.events()
    began_ns = history.began_ns or events[0].time_ns
    lines = [
        f"{(event.time_ns - began_ns) / 1e9:>10.3f} s  {event.what:<10}  {event.about}"
        f"  [{event.sequence} of {event.stream}]"
        for event in events
    ]
    return "\n".join(
        [history.trajectory_id, *lines, *([] if history.ended else ["              open: it has no end yet"])]
    )


async def _read(arguments: argparse.Namespace) -> tuple[TrajectoryHistory, Sample | None]:
    root = local_directory(arguments)
    async with reached(arguments, "explain") as bus:
        history = await read_history(bus, arguments.trajectory)
        sample = await sample_reader(bus, root).read(history.trajectory_id, history.result) if history.result else None
    if sample is None and root is not None:  # its tokens were trimmed
        kept = (sample for row in SamplesFile(root).rows() for sample in row.samples)
        sample = next((sample for sample in kept if sample.name == history.trajectory_id), None)
    return history, sample
