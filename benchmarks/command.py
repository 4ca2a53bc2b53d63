"""`asyncrl bench NAME`: measure asyncrl on this machine and compare the figures with the goals.

Existing runs are not changed.
"""

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

from asyncrl.config.sandbox_settings import SANDBOXES
from benchmarks.goals import Goal, goals_of
from benchmarks.options import OPTIONS

NAMES = {
    "engine": "tokens per second of the embedded engine",
    "bus": "typed messages over bare NATS, durable publishes, codec",
    "schedule": "steps per second of real runs as a share of the ideal schedule",
    "pipeline": "trajectories per second from prompt to packed batch, and their CPU time",
    "idle": "CPU time of a run that waits",
    "recovery": "seconds from the kill of each role to its recovery",
    "publication": "seconds that the learner pauses for a version and a checkpoint, and seconds until they are written",
    "weights": "seconds until weights are published, and from there until many engines of one host have them",
    "direct": "seconds from a step until an engine under load has its weights: out of the store, and directly",
    "rescoring": "log-probs of a server whose weights change, compared with the trainer's for the same versions",
    "rollouts": "tokens per second of a server through asyncrl and through a bare client",
    "loop": "tokens per second of a whole run as a share of its engine alone and its trainer alone, and what is idle",
    "gateway": "time that the gateway adds to a reply, compared with direct requests to the engine",
    "live": "latencies of a gateway's clients while its model learns, compared with no training",
    "sessions": "many concurrent sessions during weight updates, through the gateway and directly",
    "session": "CPU time of a call of a program at its endpoint; CPU time and memory of idle sessions",
    "drafts": "tokens per pass of SGLang with a draft layer, before and after training of this layer",
    "learner": "tokens per second of the torch trainer, compared with a bare loop, the matrix rate and several ranks",
    "megatron": "tokens per second of the megatron trainer, in layouts of two GPUs, with experts and their replay",
    "turns": "seconds to switch a GPU between learner and engine that time-share it, and memory left on it",
    "fleet": "tokens per second while engines join and leave, and seconds until a joined one samples",
    "ray": "trajectories per second on three simulated Ray nodes and in child processes; nodes join or are killed",
    "tastes": "turns and seconds until the users of the live demo are satisfied, by learning method",
    "oracle": "steps to a reward of 0.9 at several lag bounds, compared with a synchronous loop",
    "cost": "CPU time per trajectory with and without progress messages",
    "sinks": "CPU time per trajectory with all sinks and with none; size and time of a scrape",
    "sandbox": "starts of sandboxes per second, and milliseconds of a program in one",
    "preparation": "share of busy slots while the setup of each row sleeps",
    "history": "logs of a long run: their size, and time and memory of its audit and its keepers' starts",
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
    parsers["bus"].add_argument("--rounds", type=int, default=5, help="number of rounds; every figure is their median")
    for name, seconds in (("pipeline", 10.0), ("idle", 20.0), ("cost", 12.0), ("sinks", 12.0), ("fleet", 10.0)):
        parsers[name].add_argument("--seconds", type=float, default=seconds, help="length of the measured window")
    parsers["pipeline"].add_argument(
        "--short", action="store_true", help="16 tokens from the embedded engine over HTTP, instead of 4k scripted ones"
    )
    for name in ("cost", "sinks"):
        parsers[name].add_argument("--pairs", type=int, default=15, help="runs of each kind (default: 15)")
    parsers["sinks"].add_argument(
        "--kinds", nargs="+", default=[], metavar="KIND", help="kinds of sinks (default: all installed ones)"
    )
    parsers["cost"].add_argument("--tokens", type=int, default=8000, help="tokens of a trajectory (default: 8000)")
    parsers["recovery"].add_argument(
        "--messages",
        type=int,
        default=100_000,
        help="trajectories in the logs of prompter and buffer (default: 100000)",
    )
    parsers["recovery"].add_argument("--kills", type=int, default=3, help="kills of each role; figures are medians")
    parsers["history"].add_argument(
        "--trajectories", type=int, default=1_000_000, help="trajectories of the run (default: 1000000)"
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
    _add_preparation_options(parsers["preparation"])
    parsers["gateway"].add_argument("--turns", type=int, default=300, help="measured turns (default: 300)")
    parsers["gateway"].add_argument("--tokens", type=int, default=32, help="tokens of a reply (default: 32)")
    parsers["live"].add_argument("--rate", type=float, default=20.0, help="requests per second (default: 20)")
    parsers["live"].add_argument("--seconds", type=float, default=60.0, help="length of each window (default: 60)")
    kinds = ["still", "shared", "trained"]
    parsers["live"].add_argument(
        "--kinds", nargs="+", choices=kinds, default=kinds, help="kinds of runs (default: all)"
    )
    parsers["live"].add_argument("--rounds", type=int, default=1, help="runs of each kind, in turn (default: 1)")
    parsers["live"].add_argument("--nice", type=int, default=10, help="gateway.nice (default: 10)")
    choices = ("none", "ranks", "all")
    parsers["live"].add_argument("--idle", choices=choices, default="none", help="gateway.idle (default: none)")
    gap = "gateway.idle_wait_s; 0: none (default: 0.25)"
    parsers["live"].add_argument("--gap", dest="gap_s", type=float, default=0.25, metavar="SECONDS", help=gap)
    ways = ("resume", "in_place")
    parsers["live"].add_argument("--update", choices=ways, default="resume", help="weights.update (default: resume)")


def _add_preparation_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=SANDBOXES, default="bubblewrap", help="default: bubblewrap")
    parser.add_argument("--setup", type=float, default=30.0, help="seconds of a setup (default: 30)")
    parser.add_argument("--work", type=float, default=10.0, help="seconds of a program (default: 10)")
    parser.add_argument("--slots", type=int, default=4, help="rollout.slots (default: 4)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the window (default: 60)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; return 1 if the measurement was stopped or every case failed."""
    if arguments.bench is None:
        arguments.parser.print_help()
        return 0
    try:
        figures = _measure(arguments)
    except asyncio.CancelledError:  # stopped by a signal; all processes have ended already
        return 1
    if not figures:
        print(f"asyncrl: bench {arguments.bench}: every case failed; the reasons are above", file=sys.stderr)
        return 1
    if arguments.json:
        print(msgspec.json.encode(figures).decode())
    else:
        print(table(figures, goals_of(arguments.bench, short=getattr(arguments, "short", False))))
    return 0


def table(figures: Mapping[str, float], goals: Mapping[str, Goal]) -> str:
    """Return one line per figure, with its goal."""
    width = max(map(len, figures))
    lines = []
    for name, value in figures.items():
        goal = goals.get(name)
        verdict = f"   goal {goal.text():>9}   {'met' if goal.met(value) else 'MISSED'}" if goal else ""
        lines.append(f"{name:<{width}}  {_number(value):>12}{verdict}")
    return "\n".join(lines)


def _measure(arguments: argparse.Namespace) -> Figures:
    import uvloop  # the actors use uvloop too

    name = arguments.bench
    function: Callable[..., Any] = getattr(importlib.import_module(f"benchmarks.{name}"), f"bench_{name}")
    options = {key: value for key, value in vars(arguments).items() if key not in _NOT_MEASURED}
    measuring = function(**options)
    return dict(uvloop.run(_stoppable(measuring)) if asyncio.iscoroutine(measuring) else measuring)


async def _stoppable(measuring: Coroutine[Any, Any, Figures]) -> Figures:
    """Measure until the end or a SIGTERM; in both cases stop all started processes."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await measuring


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 0.01 else f"{value:.3f}"
