"""`asyncrl runs`: the runs of a folder, or of a server."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from asyncrl.bus.provision import runs_on
from asyncrl.cli.find import is_remote, server_connected
from asyncrl.cli.options import add_directory, add_server
from asyncrl.run.directory import is_locked


class RunRow(NamedTuple):
    """One run of a folder."""

    run: str
    state: str  # "live", "finished", "stopped", "crashed": it has no summary
    step: int | None  # newest of RL, from the summary
    reward: float | None  # mean of the last five steps
    began: float  # seconds since the epoch
    bytes: int  # of its directory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_directory(parser)
    add_server(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON array")


def run(arguments: argparse.Namespace) -> int:
    """List them, the newest first."""
    if is_remote(arguments):
        names = asyncio.run(_on_server(arguments))
        print(msgspec.json.encode(names).decode() if arguments.json else "\n".join(names) or "no runs")
        return 0
    rows = runs_in(Path(arguments.directory))
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode([row._asdict() for row in rows])).decode())
    elif rows:
        Console().print(_table(rows))
    else:
        print(f"no runs in {Path(arguments.directory).absolute()}")
    return 0


def runs_in(folder: Path) -> list[RunRow]:
    """The runs whose directories lie in a folder, the newest first."""
    roots = [path.parent for path in folder.glob("*/config.json")]
    return sorted(map(_row, roots), key=lambda row: row.began, reverse=True)


def _row(root: Path) -> RunRow:
    live = is_locked(root)  # before its summary is looked for: one that ends meanwhile writes it first
    try:
        summary = msgspec.json.decode((root / "summary.json").read_bytes(), type=dict)
    except (OSError, msgspec.MsgspecError):
        summary = {}
    over = "crashed" if not summary else "finished" if summary.get("finished") else "stopped"
    size = sum(map(_size, (Path(folder, file) for folder, _, files in os.walk(root) for file in files)))
    reward = summary.get("sampled_reward_last_5_steps")
    return RunRow(
        root.name,
        "live" if live else over,
        summary.get("steps"),
        reward,
        (root / "config.json").stat().st_mtime,
        size,
    )


def _size(file: Path) -> int:
    try:
        return file.lstat().st_size
    except FileNotFoundError:
        return 0  # a live run removes old weights


def _table(rows: list[RunRow]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("run", "state", "started"):
        table.add_column(name)
    for name in ("step", "reward", "MB"):
        table.add_column(name, justify="right")
    for row in rows:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.began))
        step = "" if row.step is None else f"{row.step:,}"
        reward = "" if row.reward is None else f"{row.reward:.3f}"
        table.add_row(row.run, row.state, began, step, reward, f"{row.bytes / 1e6:,.1f}")
    return table


async def _on_server(arguments: argparse.Namespace) -> list[str]:
    async with server_connected(arguments) as bus:
        return await runs_on(bus)
