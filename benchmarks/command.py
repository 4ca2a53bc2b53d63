"""`asyncrl bench NAME`: what this machine makes of asyncrl, beside the goals. Nothing of a run is touched."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from benchmarks.goals import Goal, goals_of
from benchmarks.options import OPTIONS

NAMES = {
    "engine": "tokens per second of the embedded engine",
    "bus": "typed messages over bare NATS, durable publishes, codec",
    "schedule": "steps per second of real runs as a share of the ideal schedule",
    "pipeline": "trajectories per second from prompt to packed batch, and their CPU time",
    "idle": "CPU time of a run that waits",
    "recovery": "seconds from the kill of each role to its working again",
    "publication": "seconds the learner stands still for a version and a checkpoint, and until they are written",
    "weights": "seconds until weights are published, and from there until many engines of one host have them",
    "direct": "seconds from a step until an engine under load has its weights: out of the store, and directly",
    "rescoring": "log-probs of a server whose weights change, against the trainer's of the versions that tokens name",
    "rollouts": "tokens per second of a server through asyncrl, and by a bare client",
    "gateway": "what the gateway adds to a reply, beside the same ids sent straight to the engine",
    "live": "what clients of a gateway meet while its model learns, beside the same load without training",
    "sessions": "many sessions at once through the gateway while versions come, beside the same ids straight",
    "drafts": "tokens of one pass of SGLang whose model drafts them, before its layer for it is trained and after",
    "learner": "tokens per second of the trainer, beside a bare loop, the matrix rate, and itself on several ranks",
    "megatron": "the same of the trainer on megatron-core, in layouts of two GPUs, with experts and their replay",
    "turns": "seconds of the switches of a GPU that learner and engine have by turns, and what they leave on it",
    "fleet": "tokens per second while engines join and leave, and seconds until a joined one samples",
    "ray": "trajectories per second on three simulated nodes of Ray and by child processes; nodes join, and are killed",
    "tastes": "turns and seconds until the users of the live demo are satisfied, by method of learning",
    "oracle": "steps to a reward of 0.9 at several bounds of the lag, beside a synchronous loop",
    "cost": "CPU time per trajectory with progress messages, against none",
    "history": "logs of a long run: their size, and seconds and memory of its audit and its keepers' starts",
}
Figures = dict[str, float]
_NOT_MEASURED = ("run", "parser", "bench", "json")  # arguments; all others are options of the measurement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    names = parser.add_subparsers(title="measurements", metavar="NAME", dest="bench")
    parsers = {name: names.add_parser(name, help=about, description=about) for name, about in NAMES.items()}
    for one in parsers.values():
        one.add_argument(
            "--json", action="store_true", help="print one JSON object: figures by name, units in the names"
        )
    parsers["bus"].add_argument("--rounds", type=int, default=5, help="rounds; every figure is the median over them")
    for name, seconds in (("pipeline", 10.0), ("idle", 20.0), ("cost", 12.0), ("fleet", 10.0)):
        parsers[name].add_argument("--seconds", type=float, default=seconds, help="length of the measured window")
    parsers["pipeline"].add_argument(
        "--short", action="store_true", help="16 tokens from the embedded engine over HTTP, instead of 4k scripted ones"
    )
    parsers["cost"].add_argument("--pairs", type=int, default=15, help="runs of each kind (default: 15)")
    parsers["cost"].add_argument("--tokens", type=int, default=8000, help="of a trajectory (default: 8000)")
    parsers["recovery"].add_argument(
        "--messages",
        type=int,
        default=100_000,
        help="trajectories in the logs of prompter and buffer (default: 100000)",
    )
    parsers["recovery"].add_argument("--kills", type=int, default=3, help="of each role; figures are medians")
    parsers["history"].add_argument(
        "--trajectories", type=int, default=1_000_000, help="of the run whose logs are written (default: 1000000)"
    )
    parsers["history"].add_argument(
        "--directory",
        type=os.path.abspath,
        metavar="FOLDER",
        help="keep the run as FOLDER/history; it can be resumed",
    )
    parsers["history"].add_argument(
        "--snapshots", action="store_true", help="let prompter and buffer fold the logs once and store snapshots"
    )
    for name, add in OPTIONS.items():
        add(parsers[name])
    parsers["gateway"].add_argument("--turns", type=int, default=300, help="measured ones (default: 300)")
    parsers["gateway"].add_argument("--tokens", type=int, default=32, help="of a reply (default: 32)")
    parsers["live"].add_argument("--rate", type=float, default=20.0, help="requests per second (default: 20)")
    parsers["live"].add_argument("--seconds", type=float, default=60.0, help="length of each window (default: 60)")
    kinds = ["still", "shared", "trained"]
    parsers["live"].add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="of runs (default: all)")
    parsers["live"].add_argument("--rounds", type=int, default=1, help="runs of each kind, in turn (default: 1)")
    parsers["live"].add_argument("--nice", type=int, default=10, help="gateway.nice (default: 10)")
    choices = ("none", "ranks", "all")
    parsers["live"].add_argument("--idle", choices=choices, default="none", help="gateway.idle (default: none)")
    gap = "gateway.idle_wait_s; 0: none (default: 0.25)"
    parsers["live"].add_argument("--gap", dest="gap_s", type=float, default=0.25, metavar="SECONDS", help=gap)
    ways = ("resume", "in_place")
    parsers["live"].add_argument("--update", choices=ways, default="resume", help="weights.update (default: resume)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns 1 when the measurement was stopped, or every case failed."""
    if arguments.bench is None:
        arguments.parser.print_help()
        return 0
    try:
        figures = _measure(arguments)
    except asyncio.CancelledError:  # asked to stop; every process is gone already
        return 1
    if not figures:
        print(f"asyncrl: bench {arguments.bench}: no case was measured, for the reasons above", file=sys.stderr)
        return 1
    if arguments.json:
        print(msgspec.json.encode(figures).decode())
    else:
        print(table(figures, goals_of(arguments.bench, short=getattr(arguments, "short", False))))
    return 0


def table(figures: Mapping[str, float], goals: Mapping[str, Goal]) -> str:
    """Figures beside their goals, a line each."""
    width = max(map(len, figures))
    lines = []
    for name, value in figures.items():
        goal = goals.get(name)
        verdict = f"   goal {goal.text():>9}   {'met' if goal.met(value) else 'MISSED'}" if goal else ""
        lines.append(f"{name:<{width}}  {_number(value):>12}{verdict}")
    return "\n".join(lines)


def _measure(arguments: argparse.Namespace) -> Figures:
    import uvloop  # as the actors run

    name = arguments.bench
    function: Callable[..., Any] = getattr(importlib.import_module(f"benchmarks.{name}"), f"bench_{name}")
    options = {key: value for key, value in vars(arguments).items() if key not in _NOT_MEASURED}
    measuring = function(**options)
    return dict(uvloop.run(_stoppable(measuring)) if asyncio.iscoroutine(measuring) else measuring)


async def _stoppable(measuring: Coroutine[Any, Any, Figures]) -> Figures:
    """Measure until the end or a SIGTERM; either way whatever was started is stopped."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await measuring


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 0.01 else f"{value:.3f}"
