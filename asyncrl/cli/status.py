"""`asyncrl status`: what a run looks like now, from its topics."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import msgspec
from rich.console import Console

from asyncrl.bus.connection import Bus
from asyncrl.cli.find import find_directory, is_remote
from asyncrl.cli.options import add_run
from asyncrl.cli.reach import reached
from asyncrl.cli.screen import render
from asyncrl.run.directory import is_locked
from asyncrl.state.view import RunView
from asyncrl.state.watch import Watch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Read the logs, print the picture."""
    view = asyncio.run(_read(arguments))
    now_ns = view.last_ns if view.over else time.time_ns()
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(figures(view, now_ns))).decode())
    else:
        Console().print(render(view, now_ns))
    return 0


async def _read(arguments: argparse.Namespace) -> RunView:
    def is_gone() -> bool:
        return not is_remote(arguments) and not is_locked(find_directory(arguments, live=False))

    gone = is_gone()  # asked on both sides: a run that ends meanwhile stores its end behind what is read
    async with reached(arguments, "status") as bus:
        view = await read_view(bus)
    if gone and is_gone():
        view.on_gone()
    return view


async def read_view(bus: Bus) -> RunView:
    """Read a run's topics up to now."""
    view = RunView(bus.run)
    watch = Watch(bus, view)
    await watch.start()
    await watch.close()
    return view


def figures(view: RunView, now_ns: int) -> dict[str, Any]:
    """The view as plain values; units are in the names."""
    newest, mean_lag = view.step, view.mean_lag
    return {
        "run": view.run,
        "state": view.state,
        "failure": view.failure,
        "elapsed_s": round((now_ns - view.first_ns) / 1e9, 1) if view.first_ns else 0.0,
        "stage": newest.stage if newest is not None else None,
        "step": newest.step if newest is not None else None,
        "version": view.version,
        "lineage": view.lineage,
        "checkpoint_step": view.checkpoint,
        "reward": view.rewards[-1] if view.rewards else None,
        "metrics": view.metrics,
        "mean_lag_versions": round(mean_lag, 4) if mean_lag is not None else None,
        "recent_tokens_by_lag": {str(lag): tokens for lag, tokens in view.lags.items()},
        "per_s": {name: round(rate, 3) for name, rate in view.rates().items()},
        "evals": [{"version": scored.version, "accuracy": scored.accuracy} for scored in view.evals],
        "queues": view.queues,
        "streams": {
            name: {"bytes": filled.bytes, "max_bytes": filled.max_bytes, "share": round(filled.share, 4)}
            for name, filled in view.streams.items()
        },
        "trims": view.trims,
        "trimmed_bytes": view.trimmed_bytes,
        "admission_paused": view.paused,
        "open_groups": view.gauge("prompter", "open_groups"),
        "ready_groups": view.gauge("buffer", "ready_groups"),
        "engines": [engine._asdict() for engine in sorted(view.engines.values())],
        "wanted": view.wanted,
        "actors": [
            {
                "actor_id": actor.actor_id,
                "role": actor.role,
                "host": actor.host,
                "pid": actor.pid,
                "live": actor.live,
                "restarts": actor.restarts,
                "last_words": actor.last_error,
                "silent_s": round(max(0, now_ns - actor.seen_ns) / 1e9, 1) if actor.seen_ns else None,
                "vitals": actor.vitals,
            }
            for actor in view.fleet
        ],
        "stalls": [msgspec.structs.asdict(stall) for stall in view.stalls.values()],
        "trajectories_failed": view.failed.count,
        "last_failure": view.failed.last,
        "messages_unreadable": view.dead.count,
        "last_unreadable": view.dead.last,
    }
