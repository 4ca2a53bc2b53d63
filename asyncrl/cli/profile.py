"""`asyncrl profile`: record steps of the learner, the Python stacks of an actor, or an inference server."""

from __future__ import annotations

import argparse
import asyncio

from asyncrl.api.profiles import profile_cpu, profile_engine, profile_steps
from asyncrl.cli.logs import actor_of
from asyncrl.cli.options import add_option
from asyncrl.cli.target import add_run, add_wait, live_run
from asyncrl.errors import WrongUsage
from topics.roles import role_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the live one", remote=False)
    parser.add_argument("actor", nargs="?", default="", metavar="ACTOR", help="such as learner, rollout-2 or engine-1")
    add_option(parser, "--steps N", int, "of the learner: its next N steps, as traces of torch's profiler (default: 3)")
    add_option(parser, "--seconds S", float, "of others: stacks by py-spy; of engines: their profiler (default: 10)")
    add_wait(parser, 300.0, "seconds to wait for the steps")


def run(arguments: argparse.Namespace) -> int:
    """Record, and print the files."""
    actor_id = actor_of(arguments)
    found, role, seconds = live_run(arguments), role_of(actor_id), arguments.seconds or 10.0
    if role != "learner" and arguments.steps is not None:
        raise WrongUsage(f"--steps is of the learner; {actor_id} is recorded for --seconds")
    if role == "learner" and arguments.seconds is None:
        for path in asyncio.run(profile_steps(found, actor_id, arguments.steps or 3, arguments.wait)):
            print(f"{path}  (open it at ui.perfetto.dev)")
        return 0
    if role == "engine":
        print(f"{asyncio.run(profile_engine(found, actor_id, seconds))}  (open its files at ui.perfetto.dev)")
        return 0
    print(f"{asyncio.run(profile_cpu(found, actor_id, seconds))}  (open it at speedscope.app)")
    return 0
