"""`asyncrl compare`: the metrics of a run against a corridor of trusted runs; the exit code is 1 if it leaves it."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from asyncrl.cli.options import add_option
from asyncrl.cli.output import add_json, show
from asyncrl.errors import WrongUsage
from asyncrl.run.connect import named_directory
from asyncrl.run.directory import RunFiles
from asyncrl.state.compare import Verdict, judge, read_figures

_METRICS = ["reward/mean", "response_length/mean"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="run", help="name or directory of the run that is judged")
    parser.add_argument("trusted", nargs="+", help="names or directories of trusted runs, which span the corridor")
    words = f"metric that is compared, such as lag/mean; may be repeated (default: {' and '.join(_METRICS)})"
    parser.add_argument("--metric", action="append", default=[], metavar="NAME", help=words)
    add_option(parser, "--window STEPS", 5, "steps over which a mean is taken")
    add_option(parser, "--tolerance SHARE", 0.1, "part of its values by which the corridor is wider on both sides")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Judge the run and print the verdict on each metric."""
    if arguments.window < 1 or arguments.tolerance < 0:
        raise WrongUsage("--window is 1 or more steps, and --tolerance 0 or more")
    names = arguments.metric or _METRICS
    figures, *trusted = [read_figures(files_of(name).metrics, names) for name in (arguments.name, *arguments.trusted)]
    verdicts = [
        judge(name, figures[name], [other[name] for other in trusted], arguments.window, arguments.tolerance)
        for name in names
    ]
    show(arguments, verdicts, lambda: _table(verdicts))
    return 1 if any(verdict.fault for verdict in verdicts) else 0


def files_of(name: str) -> RunFiles:
    """Return the files of a run with metrics; its directory may be a copy, such as one that CI keeps.

    Raises:
        WrongUsage: there is none.
    """
    root = named_directory(name, Path("runs"))
    if root is None or not RunFiles(root).metrics.exists():
        raise WrongUsage(f"{name}: expected the name or the directory of a run with metrics.jsonl")
    return RunFiles(root)


def _table(verdicts: list[Verdict]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("metric", "verdict", "step", "value", "corridor", ""):
        table.add_column(column)
    for one in verdicts:
        corridor = "" if one.low is None or one.high is None else f"{one.low:.4g} to {one.high:.4g}"
        step, value = ("" if found is None else f"{found:.4g}" for found in (one.worst_step, one.value))
        table.add_row(one.metric, "fails" if one.fault else "passes", step, value, corridor, one.fault)
    return table
