"""`asyncrl trace`: write a run as a trace in the Trace Event Format, which Perfetto opens."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import msgspec

from asyncrl.cli.options import add_option
from asyncrl.cli.target import add_run, any_run
from asyncrl.errors import WrongUsage
from asyncrl.state.records import counted
from asyncrl.state.trace import read_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_option(parser, "-o --output FILE", Path, "JSON file to write (default: RUN-trace.json)")
    add_option(parser, "--trajectories N", 10_000, "hold the newest N trajectories")


def run(arguments: argparse.Namespace) -> int:
    """Read the logs, write the file."""
    if arguments.trajectories < 0:
        raise WrongUsage(f"--trajectories {arguments.trajectories}: expected 0 or more")
    found = any_run(arguments)
    trace = asyncio.run(read_trace(found, arguments.trajectories))
    output = arguments.output or Path(f"{found.run}-trace.json")
    output.write_bytes(msgspec.json.encode(trace))
    left_out = trace.otherData["trajectories_left_out"]
    older = f", without {counted(left_out, 'older trajectory')}" if left_out else ""
    print(f"{counted(len(trace.traceEvents), 'event')} in {output}{older}; open it with Perfetto or chrome://tracing")
    return 0
