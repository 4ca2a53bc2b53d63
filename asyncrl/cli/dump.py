"""`asyncrl dump`: write one batch of a run as plain files."""

from __future__ import annotations

import argparse
from pathlib import Path

from actors.learner.fetching import PayloadGone, fetch_trajectories
from actors.learner.retraining import read_training
from asyncrl.bus.connection import Bus
from asyncrl.bus.merged_reader import read_log
from asyncrl.cli.options import add_option
from asyncrl.cli.target import add_run, any_run, read_topics
from asyncrl.errors import WrongUsage
from asyncrl.state.records import spans_text
from asyncrl.state.samples import samples_of, training_batch
from asyncrl.training.dump import DumpError, write_dump
from topics.topic import TRAJECTORIES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the newest")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step of the batch")
    add_option(parser, "--output FOLDER", "", "a new folder (default: RUN/dumps/stepN)")


def run(arguments: argparse.Namespace) -> int:
    """Write it."""
    found = any_run(arguments)
    if found.root is None and not arguments.output:
        raise WrongUsage(f"run {found.run} has no directory here; name the folder to write with --output")
    out = Path(arguments.output) if arguments.output else found.files.root / "dumps" / f"step{arguments.step:06d}"
    if out.exists():
        raise DumpError(f"{out} exists; name another folder with --output")

    async def dump(bus: Bus) -> None:
        log = await read_training(bus)
        packed, _ = log.batch(arguments.step)
        try:
            groups = await fetch_trajectories(bus, packed)
        except PayloadGone as error:
            await read_log(bus, TRAJECTORIES, log)
            kept = spans_text([step for step, (batch, _) in log.batches.items() if log.has_tokens(batch)])
            raise DumpError(f"{error}; batches with all tokens: {kept} (nats.keep = run keeps those of all)") from error
        _, samples = await samples_of(bus, training_batch(packed), found, 0)
        write_dump(out, bus.run, (packed, log.trained.get(packed.step)), groups, samples)

    read_topics(found, "dump", dump)
    print(out)
    return 0
