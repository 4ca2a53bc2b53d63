"""`asyncrl explain`: the history of one trajectory, from the issue of its prompt to its end."""

from __future__ import annotations

import argparse

from asyncrl.bus.connection import Bus
from asyncrl.cli.output import Terminal
from asyncrl.cli.samples import sample_text
from asyncrl.cli.target import add_run, any_run, read_topics
from asyncrl.errors import WrongUsage
from asyncrl.run.connect import FoundRun
from asyncrl.state.history import TrajectoryHistory, read_history
from asyncrl.state.samples import Sample, SamplesFile, open_sample, sample_reader
from topics.ids import TRAJECTORY_ID, is_prompt_id, prompt_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("trajectory", metavar="TRAJECTORY", help="such as p000042-3: member 3 of the group of a prompt")


def run(arguments: argparse.Namespace) -> int:
    """Read the messages about it, and print them in order of time."""
    name, found = trajectory_id(arguments), any_run(arguments)
    history, sample = read_topics(found, "explain", lambda bus: _read(bus, found, name))
    print(history_text(history))
    if sample is not None:
        Terminal(highlight=False, soft_wrap=True).print(sample_text(sample))
    return 0


def trajectory_id(arguments: argparse.Namespace) -> str:
    """Return the id that a command is about.

    Raises:
        WrongUsage: it has another form.
    """
    name: str = arguments.trajectory
    if TRAJECTORY_ID.match(name) is None or not is_prompt_id(prompt_of(name)):
        raise WrongUsage(f"{name!r} is no trajectory; their ids look like p000042-3")
    return name


def history_text(history: TrajectoryHistory) -> str:
    """Seconds since the run began, the message and its place, one a line."""
    events = history.events()
    began_ns = history.began_ns or events[0].time_ns
    lines = [
        f"{(event.time_ns - began_ns) / 1e9:>10.3f} s  {event.what:<10}  {event.about}"
        f"  [{event.sequence} of {event.stream}]"
        for event in events
    ]
    lines += [] if history.result or not history.graded else ["              its tokens were trimmed: no longer stored"]
    lines += [] if history.ended else ["              open: it has no end yet"]
    return "\n".join([history.trajectory_id, *lines])


async def _read(bus: Bus, found: FoundRun, name: str) -> tuple[TrajectoryHistory, Sample | None]:
    history = await read_history(bus, name)
    sample = await sample_reader(bus, found).read(name, history.result) if history.result else None
    if sample is None and found.root is not None:  # its tokens were trimmed
        kept = (sample for row in SamplesFile(found.root).rows() for sample in row.samples)
        sample = next((sample for sample in kept if sample.name == name), None)
        sample = await open_sample(bus, sample) if sample is not None else None
    return history, sample
