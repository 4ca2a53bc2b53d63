"""`asyncrl runs`: the runs of a folder, or of a server."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rich.table import Table

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusDenied, BusUnreachable
from asyncrl.bus.provision import runs_on
from asyncrl.cli.output import add_json, show
from asyncrl.cli.target import add_directory, add_server, given_login
from asyncrl.files import disk_usage
from asyncrl.run.connect import RunNotFound
from asyncrl.run.directory import RunFiles, is_locked


class RunRow(NamedTuple):
    """One run of a folder."""

    run: str
    state: str  # "live", "finished", "failed", "stopped"; without a summary "crashed", or "not begun"
    step: int | None  # newest in the metrics; 0 and less are of the warm-up
    reward: float | None  # mean of the last five steps of RL
    began: float  # seconds since the epoch
    bytes: int  # of its directory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_directory(parser)
    add_server(parser)
    add_json(parser, "as one JSON array")


def run(arguments: argparse.Namespace) -> int:
    """List them, the newest first."""
    login = given_login(arguments)
    if login is not None:
        names = asyncio.run(_on_server(login))
        show(arguments, names, lambda: "\n".join(names) or "no runs")
        return 0
    folder = Path(arguments.directory)
    rows = runs_in(folder)
    values = [row._asdict() for row in rows]
    show(arguments, values, lambda: _table(rows) if rows else f"no runs in {folder.absolute()}")
    return 0


def runs_in(folder: Path) -> list[RunRow]:
    """The runs whose directories lie in a folder, the newest first."""
    roots = [path.parent for path in folder.glob("*/config.json")]
    return sorted(map(_row, roots), key=lambda row: row.began, reverse=True)


def _row(root: Path) -> RunRow:
    live = is_locked(root)  # before its summary is looked for: an ending run writes it first
    files = RunFiles(root)
    steps = files.newest_steps()
    rewards = [row["reward/mean"] for row in steps if row["step"] > 0 and row["reward/mean"] is not None]
    return RunRow(
        root.name,
        "live" if live else files.end,
        steps[-1]["step"] if steps else None,
        fmean(rewards[-5:]) if rewards else None,
        (root / "config.json").stat().st_mtime,
        disk_usage(root),
    )


def _table(rows: list[RunRow]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("run", "state", "started"):
        table.add_column(name)
    for name in ("step", "reward", "MB"):
        table.add_column(name, justify="right")
    for row in rows:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.began))
        step = "" if row.step is None else f"{row.step:,}" if row.step > 0 else "warm-up"
        reward = "" if row.reward is None else f"{row.reward:.3f}"
        table.add_row(row.run, row.state, began, step, reward, f"{row.bytes / 1e6:,.1f}")
    return table


async def _on_server(address: BusAddress) -> list[str]:
    """Names of the runs of a server.

    Raises:
        RunNotFound: it does not answer, or refuses the login.
    """
    try:
        bus = await Bus.connect(address, "none", name="runs", deadline_s=3.0)
    except (BusUnreachable, BusDenied) as error:
        raise RunNotFound(f"the server at {address.url} cannot be reached: {error}") from error
    try:
        return await runs_on(bus)
    finally:
        await bus.close()
