"""`asyncrl explain`: the life of one trajectory, from the issue of its prompt to its end."""

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
from asyncrl.state.history import Life
from asyncrl.telemetry.samples import Sample, SamplesFile
from topics.actors import RUN_OPENED
from topics.batches import BATCH_PACKED, BATCH_TRAINED
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

_ID = re.compile(r"([prw]\d{6,})-\d+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_run(parser)
    parser.add_argument("trajectory", metavar="TRAJECTORY", help="such as p000042-3: member 3 of the group of a prompt")


def run(arguments: argparse.Namespace) -> int:
    """Read what was said about it, and print it in order of time."""
    if _ID.fullmatch(arguments.trajectory) is None:
        raise WrongUsage(f"{arguments.trajectory!r} is no trajectory; they are called as p000042-3 is")
    life, sample = asyncio.run(_read(arguments))
    print(life_text(life))
    if sample is not None:
        Console(highlight=False, soft_wrap=True).print(sample_text(sample))
    return 0


async def read_life(bus: Bus, trajectory_id: str) -> Life:
    """Everything that a run's topics tell about one trajectory.

    Raises:
        RunNotFound: nothing was ever said about it.
    """
    run, prompt_id = bus.run, trajectory_id.rsplit("-", 1)[0]
    life = Life(trajectory_id)
    progress = [topic.subject(run, trajectory_id) for topic in (TRAJECTORY_PROGRESSED, TRAJECTORY_GENERATED)]
    claims = [topic.subject(run, trajectory_id) for topic in (TRAJECTORY_GRADED, TRAJECTORY_FAILED)]
    drops = [TRAJECTORY_DROPPED.subject(run, trajectory_id), GROUP_DROPPED.subject(run, prompt_id)]
    await read_log(bus, ACTORS, [RUN_OPENED.subject(run)], life)
    await read_log(bus, PROMPTS, [PROMPT_ISSUED.subject(run, trajectory_id)], life, headers_only=True)
    await read_log(bus, TRAJECTORIES, progress, life, headers_only=True)
    if life.logs:
        await read_log(bus, TRAJECTORIES, [PROGRESS_STORED.subject(run, log) for log in sorted(life.logs)], life)
    await read_log(bus, GRADES, claims, life)
    if not life.moments():
        raise RunNotFound(f"run {run}: nothing was said about a trajectory {trajectory_id}")
    await read_log(bus, BATCHES, [*drops, BATCH_PACKED.subject(run)], life)
    await read_log(bus, TRAINING, [BATCH_TRAINED.subject(run)], life)
    return life


def life_text(life: Life) -> str:
    """Seconds since the run began, what was said, where it stands, one a line."""
    moments = life.moments()
    began_ns = life.began_ns or moments[0].time_ns
    lines = [
        f"{(moment.time_ns - began_ns) / 1e9:>10.3f} s  {moment.what:<10}  {moment.about}"
        f"  [{moment.sequence} of {moment.stream}]"
        for moment in moments
    ]
    return "\n".join([life.trajectory_id, *lines, *([] if life.ended else ["              open: it has no end yet"])])


async def _read(arguments: argparse.Namespace) -> tuple[Life, Sample | None]:
    root = local_directory(arguments)
    async with reached(arguments, "explain") as bus:
        life = await read_life(bus, arguments.trajectory)
        sample = await sample_reader(bus, root).read(life.trajectory_id, life.result) if life.result else None
    if sample is None and root is not None:  # its tokens were trimmed
        kept = (sample for row in SamplesFile(root).rows() for sample in row.samples)
        sample = next((sample for sample in kept if sample.name == life.trajectory_id), None)
    return life, sample
