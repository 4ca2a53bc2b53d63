"""`asyncrl bench NAME`: what this machine makes of asyncrl, beside the goals. Nothing of a run is touched."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from benchmarks.goals import Goal, goals_of

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
    "megatron": "the same of the trainer on megatron-core, in layouts of two cards, with experts and their replay",
    "fleet": "tokens per second while engines join and leave, and seconds until a joined one samples",
    "ray": "trajectories per second on three simulated nodes of Ray and by child processes; nodes join, and are killed",
    "tastes": "turns and seconds until the users of the live demo are satisfied, by method of learning",
    "oracle": "steps to a reward of 0.9 at several bounds of the lag, beside a synchronous loop",
    "cost": "CPU time per trajectory with progress messages, against none",
    "history": "logs of a long run: their size, and seconds and memory of its audit and its keepers' starts",
}
_DENSE, _MIXTURES = ("tiny", "0.6b", "4b"), ("tiny-moe", "30b-a3b")  # shapes
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
    parsers["bus"].add_argument("--rounds", type=int, default=5, help="every figure is the median of so many rounds")
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
    _add_publication_options(parsers["publication"])
    _add_weights_options(parsers["weights"])
    _add_direct_options(parsers["direct"])
    _add_schedule_options(parsers["schedule"])
    _add_rescoring_options(parsers["rescoring"])
    _add_rollouts_options(parsers["rollouts"])
    _add_learner_options(parsers["learner"])
    _add_megatron_options(parsers["megatron"])
    _add_oracle_options(parsers["oracle"])
    parsers["gateway"].add_argument("--turns", type=int, default=300, help="measured ones (default: 300)")
    parsers["gateway"].add_argument("--tokens", type=int, default=32, help="of a reply (default: 32)")
    parsers["live"].add_argument("--rate", type=float, default=20.0, help="requests per second (default: 20)")
    parsers["live"].add_argument("--seconds", type=float, default=60.0, help="length of each window (default: 60)")
    kinds = ["still", "shared", "trained"]
    parsers["live"].add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="of runs (default: all)")
    parsers["live"].add_argument("--nice", type=int, default=10, help="gateway.nice (default: 10)")
    parsers["live"].add_argument("--idle-ranks", action="store_true", help="gateway.idle_ranks")
    gap = "gateway.gap_s; 0: none (default: 0.25)"
    parsers["live"].add_argument("--gap", dest="gap_s", type=float, default=0.25, metavar="SECONDS", help=gap)
    ways = ("resume", "in_place")
    parsers["live"].add_argument("--update", choices=ways, default="resume", help="weights.update (default: resume)")
    _add_sessions_options(parsers["sessions"])
    _add_drafts_options(parsers["drafts"])
    _add_tastes_options(parsers["tastes"])
    _add_ray_options(parsers["ray"])


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns 1 when the measurement was stopped."""
    if arguments.bench is None:
        arguments.parser.print_help()
        return 0
    try:
        figures = _measure(arguments)
    except asyncio.CancelledError:  # asked to stop; every process is gone already
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


def _add_tastes_options(parser: argparse.ArgumentParser) -> None:
    methods = ("binary", "distillation", "combine")
    parser.add_argument("--methods", nargs="+", choices=methods, default=list(methods), help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], help="a run each (default: 1 to 5)")
    parser.add_argument("--tastes", type=int, choices=(1, 2), default=1, help="of the users (default: 1)")
    parser.add_argument("--steps", type=int, default=60, help="optimiser steps of a run (default: 60)")
    parser.add_argument(
        "--limit",
        dest="limit_s",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="time after which a run is asked to stop; 0 for none (default)",
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, of about two cores each (default: 1)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all runs; repeatable")


def _add_ray_options(parser: argparse.ArgumentParser) -> None:
    parts = ["rate", "join", "kills"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="default: all")
    parser.add_argument("--rounds", type=int, default=3, help="figures are medians of so many (default: 3)")
    parser.add_argument("--kills", type=int, default=20, help="of nodes, not the head (default: 20)")
    words = "for each run of the demo, each node that joins, all kills (default: 900)"
    parser.add_argument("--limit-s", type=float, default=900.0, metavar="SECONDS", help=words)


def _add_publication_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=("tiny", "67m", "0.6b", "4b"), default="tiny", help="Qwen3 (default: tiny)")
    parser.add_argument("--directory", default="", metavar="FOLDER", help="on the disk that is written to")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument("--rounds", type=int, default=5, help="figures are medians of so many (default: 5)")
    parser.add_argument(
        "--size",
        type=int,
        nargs=2,
        default=(4, 64),
        metavar=("ROWS", "TOKENS"),
        help="rows of a step and tokens of each (default: 4 64)",
    )
    parser.add_argument("--checkpoints", type=int, default=5, help="as --rounds; 0 for none (default: 5)")
    parser.add_argument("--ranks", type=int, default=1, help="measure so many ranks as well (default: 1, none)")


def _add_direct_options(parser: argparse.ArgumentParser) -> None:
    ways, updates = ("files", "staged", "stream", "ipc", "nccl", "gloo"), ("in_place", "resume")
    parser.add_argument(
        "--ways", nargs="+", choices=ways, default=["files", "ipc", "gloo"], help="default: files ipc gloo"
    )
    parser.add_argument("--updates", nargs="+", choices=updates, default=list(updates), help="default: both")
    parser.add_argument("--delta", action="store_true", help="versions are differences to the one before")
    parser.add_argument("--idle", action="store_true", help="begin no step before the version of the last has arrived")
    parser.add_argument("--rounds", type=int, default=5, help="figures are medians of so many (default: 5)")
    words = "of each way, the start of its server included (default: 1800)"
    parser.add_argument("--deadline-s", type=float, default=1800.0, metavar="SECONDS", help=words)
    _add_server_options(parser)
    _add_trainer_options(parser)


def _add_rescoring_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=800, help="of an answer (default: 800)")
    parser.add_argument("--crossed", type=int, default=3, help="updates while it is sampled (default: 3)")
    parser.add_argument("--lr", type=float, default=1e-3, help="of the steps between them (default: 1e-3)")
    _add_server_options(parser)
    _add_trainer_options(parser)


def _add_drafts_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arguments", default="", help="of SGLang, as on a command line")
    parser.add_argument("--pythonpath", default="", metavar="FOLDERS", help="with which SGLang is imported")
    parser.add_argument("--prompts", type=int, default=64, help="requests at once (default: 64)")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer (default: 256)")
    parser.add_argument("--steps", type=int, default=200, help="of training (default: 200)")
    parser.add_argument("--lr", type=float, default=1e-3, help="of its steps (default: 1e-3)")


def _add_sessions_options(parser: argparse.ArgumentParser) -> None:
    ways, updates = ("files", "staged", "ipc", "nccl", "gloo"), ("in_place", "resume")
    parser.add_argument("--way", choices=ways, default="files", help="of the versions (default: files)")
    parser.add_argument("--updates", nargs="+", choices=updates, default=list(updates), help="default: both")
    parser.add_argument("--sessions", type=int, default=16, help="at once (default: 16)")
    parser.add_argument("--gateways", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--clients", type=int, default=1, help="processes that share the sessions (default: 1)")
    parser.add_argument("--tokens", type=int, default=128, help="of a reply (default: 128)")
    parser.add_argument("--versions", type=int, default=20, help="of a window (default: 20)")
    words = "from one step to the next, or longer where a version takes longer (default: 2)"
    parser.add_argument("--every-s", type=float, default=2.0, metavar="SECONDS", help=words)
    words = "no steps: all versions have the weights of the first, and nothing beside them stops the server"
    parser.add_argument("--still", action="store_true", help=words)
    _add_server_options(parser)
    parser.add_argument("--device", default="cpu", help="of the trainer: cpu (default), cuda or cuda:N")
    parser.add_argument("--gpus", type=int, nargs="*", default=[], metavar="N", help="of the server")
    parser.add_argument(
        "--size", type=int, nargs=2, default=(4, 64), metavar=("ROWS", "TOKENS"), help="of a step (default: 4 64)"
    )


def _add_trainer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="of the trainer: cpu (default), cuda or cuda:N")
    parser.add_argument("--gpus", type=int, nargs="*", default=[], metavar="N", help="of the server")
    parser.add_argument("--running", type=int, default=16, help="requests under way (default: 16)")
    parser.add_argument(
        "--size", type=int, nargs=2, default=(4, 64), metavar=("ROWS", "TOKENS"), help="of a step (default: 4 64)"
    )


def _add_server_options(parser: argparse.ArgumentParser, shapes: Sequence[str] = _DENSE) -> None:
    parser.add_argument("--kind", choices=("embedded", "sglang"), default="embedded", help="of the server")
    parser.add_argument("--shape", choices=shapes, default="tiny", help="Qwen3 (default: tiny)")
    parser.add_argument("--arguments", default="", help="of SGLang, as on a command line")
    parser.add_argument("--pythonpath", default="", metavar="FOLDERS", help="with which SGLang is imported")


def _add_rollouts_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--concurrent", type=int, nargs="+", default=[16, 64], metavar="N", help="trajectories (default: 16 64)"
    )
    parser.add_argument("--workers", type=int, default=1, help="rollout workers that share them (default: 1)")
    parser.add_argument("--tokens", type=int, default=200, help="of a generation, on average (default: 200)")
    parser.add_argument("--turns", type=int, default=1, help="generations of a trajectory (default: 1)")
    parser.add_argument("--tool-s", type=float, default=0.05, help="seconds between two turns (default: 0.05)")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a window (default: 15)")
    parser.add_argument("--rounds", type=int, default=3, help="figures are medians of so many (default: 3)")
    words = "measure with the experts of each token recorded, too, on a server that returns them"
    parser.add_argument("--routing", action="store_true", help=words)
    _add_server_options(parser, (*_DENSE, *_MIXTURES))
    _add_layers_option(parser)


def _add_layers_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=0, help="of the model (default: as many as the shape has)")


def _add_learner_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=_DENSE, default="tiny", help="Qwen3 (default: tiny)")
    _add_step_options(parser)
    parser.add_argument("--ranks", type=int, default=1, help="measure so many ranks as well (default: 1, none)")
    kinds = ["asyncrl", "bare", "masters"]
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=kinds,
        default=kinds[:2],
        help="masters: bare, with float32 ones (default: others)",
    )


def _add_megatron_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=(*_DENSE, *_MIXTURES), default="tiny", help="Qwen3 (default: tiny)")
    _add_layers_option(parser)
    _add_step_options(parser)
    cases = ["one", "bare", "looped", "replayed", "data", "tensor", "pipeline", "context", "expert"]
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases[:4], help="default: those of one card")


def _add_step_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--tokens", type=int, default=8192, help="of a step and rank (default: 8192)")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192, help="of a pass (default: 8192)")
    parser.add_argument("--rounds", type=int, default=5, help="figures are medians of so many (default: 5)")
    rows = ["even", "mixed"]
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows, help="default: even mixed")
    parser.add_argument("--options", nargs="+", default=[], metavar="NAME=VALUE", help="of the trainer: recompute=true")


def _add_oracle_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="demo", help="file, or name of a shipped one (default: demo)")
    parser.add_argument("--lags", type=int, nargs="*", default=[0, 1, 2, 4, 8], help="bounds (default: 0 1 2 4 8)")
    parser.add_argument(
        "--uncorrected",
        type=int,
        nargs="*",
        default=[8],
        help="bounds measured without correction, too (default: 8)",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="of prompts and draws, a run each (default: 1 2 3)"
    )
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="of all runs; repeatable"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, of one to two cores each (default: 1)")
    parser.add_argument(
        "--output",
        type=os.path.abspath,
        metavar="FOLDER",
        help="gets oracle.jsonl, oracle.md and oracle.png; what the first has is not measured again",
    )
    parser.add_argument(
        "--limit-s", type=float, default=0.0, metavar="SECONDS", help="give up what runs after so long (default: none)"
    )


def _add_weights_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", choices=("files", "stream"), default="files", help="where versions lie (default: files)"
    )
    parser.add_argument("--mib", type=int, choices=(8, 256), default=256, help="size of a version (default: 256)")
    parser.add_argument(
        "--changed",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the elements that a step changes; versions are differences (default: full ones, all changed)",
    )
    parser.add_argument("--engines", type=int, default=8, help="embedded ones on this host (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="figures are medians of so many (default: 5)")


def _add_schedule_options(parser: argparse.ArgumentParser) -> None:
    def several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda text: [kind(part) for part in text.split(",")]

    parser.add_argument(
        "--means",
        dest="means_s",
        type=several(float),
        default=[0.01, 0.1, 1.0, 10.0],
        metavar="SECONDS,...",
        help="mean durations of a generation (default: 0.01,0.1,1,10)",
    )
    parser.add_argument(
        "--lags", type=several(int), default=[1, 2, 4], metavar="L,...", help="values of max_lag (default: 1,2,4)"
    )
    parser.add_argument(
        "--seeds", type=several(int), default=[1, 2, 3, 4, 5], metavar="SEED,...", help="default: 1,2,3,4,5"
    )
    parser.add_argument("--steps", type=int, default=40, help="training steps of each run (default: 40)")
    parser.add_argument(
        "--parallel", type=int, default=0, help="runs at once; 0 (default) for 15 at 10 s, 5 at 1 s, else 1"
    )


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 0.01 else f"{value:.3f}"
