"""`asyncrl report`: write the page of a run with the data inside, as one HTML file."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from asyncrl.api.report import write_run_report
from asyncrl.cli.options import add_option
from asyncrl.cli.target import add_run, any_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_option(parser, "-o --output FILE", Path, "HTML file to write (default: report.html in the run's folder)")


def run(arguments: argparse.Namespace) -> int:
    """Read the topics, write the file."""
    found = any_run(arguments)
    inside = found.root / "report.html" if found.root is not None else Path(f"{found.run}-report.html")
    output = arguments.output or inside
    asyncio.run(write_run_report(found, output))
    print(f"wrote {output}, {output.stat().st_size / 1000:,.0f} kB: open it with a browser")
    return 0
