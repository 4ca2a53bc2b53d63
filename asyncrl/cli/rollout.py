"""`asyncrl rollout`: sample and grade completions of a model as it is, and write them as a Parquet file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from asyncrl.bus.connection import Bus
from asyncrl.cli.options import add_option
from asyncrl.cli.target import add_config, add_settings, given_config
from asyncrl.cli.up import bring_up
from asyncrl.config.load import load_config
from asyncrl.errors import WrongUsage
from asyncrl.run.launch import Launch
from asyncrl.run.preflight import check_surroundings
from asyncrl.state.live_screen import RunView
from asyncrl.state.rollout_rows import write_rollouts

_ROLES = ["prompter", "rollout", "reward", "groupreward", "buffer", "engine"]
_BATCH_GROUPS = 64  # at most: as many prompts are written at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_settings(parser)
    parser.add_argument("--prompts", type=int, required=True, metavar="N", help="prompts to sample from, then stop")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.parquet", help="new file, a row per completion")
    add_option(parser, "--run NAME", "", "id of the run (default: the config's)", "run_id")


def run(arguments: argparse.Namespace) -> int:
    """Sample, grade, write, and stop; returns 0 when the file is written, else 1."""
    import uvloop

    output, prompts = Path(arguments.output), arguments.prompts
    if prompts < 1:
        raise WrongUsage(f"--prompts {prompts}: expected at least 1")
    if output.suffix != ".parquet":
        raise WrongUsage(f"--output {output}: expected a name that ends in .parquet")
    if output.exists():
        raise WrongUsage(f"--output {output}: the file is there; remove it, or give another name")
    overrides = [*arguments.set, *([f"run={arguments.run_id}"] if arguments.run_id else []), *mode_of(prompts)]
    launch = Launch(load_config(given_config(arguments), overrides=overrides, further=check_surroundings))
    launch.prepare()
    print(f"run {launch.config.run} in {launch.files.root}", flush=True)

    async def collect(bus: Bus, view: RunView) -> None:
        def report(done: int) -> None:
            view.report("news", f"{done:,} of {prompts:,} prompts")

        await write_rollouts(bus, output, launch.config.learner.steps, report)

    code = int(uvloop.run(bring_up(launch, work=collect)))
    if not output.exists():
        print(f"{output} is not written: the run ended before {prompts:,} prompts were graded", file=sys.stderr)
        return 1
    print(output)
    return code


def mode_of(prompts: int) -> list[str]:
    """Return the settings of a run without a learner that ends after so many prompts, without a bound on lag."""
    batch = next(size for size in range(min(_BATCH_GROUPS, prompts), 0, -1) if prompts % size == 0)
    steps = prompts // batch
    return [
        f"only={_ROLES}",
        "warmup.steps=0",
        f"buffer.batch_groups={batch}",
        f"buffer.max_lag={steps}",
        f"learner.steps={steps}",
        "learner.filters=[]",
        'nats.keep="run"',
    ]
