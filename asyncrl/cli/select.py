"""`asyncrl select`: write the rows that the policy of a run solves sometimes, for another run to train on."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import BinaryIO

import msgspec

from asyncrl.bus.connection import Bus
from asyncrl.cli.options import add_option
from asyncrl.cli.output import add_json, show
from asyncrl.cli.target import add_run, any_run, read_topics
from asyncrl.errors import AsyncRLError, WrongUsage
from asyncrl.files import open_private
from asyncrl.state.learnability import Band, Selection, Which, select_rows
from topics.prompts import PromptRow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    band = Band()
    parser.add_argument("--output", required=True, metavar="FILE.jsonl", help="new file for the rows, a `task.source`")
    add_option(parser, "--above ABOVE", band.above, "select rows with a pass rate above this (default: 0)")
    add_option(parser, "--at-most AT_MOST", band.at_most, "and up to and including this")
    add_option(parser, "--passing PASSING", band.passing, "smallest reward that counts as passed")
    add_option(parser, "--groups N", band.groups, "N newest groups of each row whose answers are counted together")
    add_option(parser, "--task NAME", "", "only rows of this task, if the run has several")
    add_option(parser, "--eval VERSION", int, "rows of the evaluation of VERSION", "version")
    add_option(parser, "--set NAME", str, "with --eval: the evaluation on the held-out set NAME", "dataset")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the rows, and print how many there are of each kind."""
    band = Band(arguments.above, arguments.at_most, arguments.passing, arguments.groups)
    _check(band, arguments)
    output = Path(arguments.output)

    found, which = any_run(arguments), Which(arguments.task, arguments.version, arguments.dataset)
    aside = output.with_name(f".{output.name}.partial")
    try:
        with open_private(aside, "wb") as file:

            async def select(bus: Bus) -> Selection:
                return await select_rows(bus, band, which, lambda row: _write(file, row))

            selection = read_topics(found, "select", select)
        if not selection.selected:
            raise AsyncRLError(f"{selection}; {output} is not written: a task needs rows")
        aside.replace(output)
    except OSError as error:
        raise AsyncRLError(f"{output} cannot be written: {error}") from error
    finally:
        aside.unlink(missing_ok=True)
    show(arguments, selection._asdict(), lambda: f"{output}: {selection}")
    return 0


def _check(band: Band, arguments: argparse.Namespace) -> None:
    if not 0 <= band.above < band.at_most <= 1:
        found = f"--above {band.above:g} --at-most {band.at_most:g}"
        raise WrongUsage(f"{found}: expected 0 <= above < at-most <= 1")
    if band.groups < 1 or not math.isfinite(band.passing):
        raise WrongUsage(f"--groups {band.groups} --passing {band.passing:g}: expected at least 1, and a finite number")
    if arguments.version is None and arguments.dataset is not None:
        raise WrongUsage(f"--set {arguments.dataset} names a held-out set: give the evaluated version, --eval VERSION")
    if arguments.version is not None and arguments.task:
        raise WrongUsage(f"--task {arguments.task} is for groups of training; --set names the set of an evaluation")
    if not arguments.output.endswith(".jsonl"):
        raise WrongUsage(f"--output {arguments.output}: expected a name that ends in .jsonl")
    if Path(arguments.output).exists():
        raise WrongUsage(f"--output {arguments.output}: the file is there; remove it, or give another name")


def _write(file: BinaryIO, row: PromptRow) -> None:
    row_of_file = {"prompt": row.prompt, "label": row.label, "metadata": row.metadata}
    file.write(msgspec.json.encode(row_of_file) + b"\n")
