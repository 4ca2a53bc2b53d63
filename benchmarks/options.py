"""Options of the measurements that have many."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_DENSE, _MIXTURES = ("tiny", "0.6b", "4b"), ("tiny-moe", "30b-a3b")  # shapes


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
    parser.add_argument("--rounds", type=int, default=3, help="rounds; figures are medians over them (default: 3)")
    parser.add_argument("--kills", type=int, default=20, help="of nodes, not the head (default: 20)")
    words = "for each run of the demo, each node that joins, all kills (default: 900)"
    parser.add_argument("--limit-s", type=float, default=900.0, metavar="SECONDS", help=words)


def _add_publication_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=("tiny", "67m", "0.6b", "4b"), default="tiny", help="Qwen3 (default: tiny)")
    parser.add_argument("--directory", default="", metavar="FOLDER", help="on the disk that is written to")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; figures are medians over them (default: 5)")
    parser.add_argument(
        "--size",
        type=int,
        nargs=2,
        default=(4, 64),
        metavar=("ROWS", "TOKENS"),
        help="rows of a step and tokens of each (default: 4 64)",
    )
    parser.add_argument("--checkpoints", type=int, default=5, help="as --rounds; 0 for none (default: 5)")
    parser.add_argument("--ranks", type=int, default=1, help="also measure this many ranks (default: 1, none)")


def _axis(text: str) -> tuple[str, int]:
    axis, _, ranks = text.partition("=")
    return axis, int(ranks)


def _add_direct_options(parser: argparse.ArgumentParser) -> None:
    ways, updates = ("files", "staged", "stream", "ipc", "nccl", "gloo"), ("in_place", "resume")
    parser.add_argument(
        "--ways", nargs="+", choices=ways, default=["files", "ipc", "gloo"], help="default: files ipc gloo"
    )
    parser.add_argument("--updates", nargs="+", choices=updates, default=list(updates), help="default: both")
    parser.add_argument("--delta", action="store_true", help="versions are differences to the one before")
    parser.add_argument("--idle", action="store_true", help="begin no step before the version of the last has arrived")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; figures are medians over them (default: 5)")
    words = "of each way, the start of its server included (default: 1800)"
    parser.add_argument("--deadline-s", type=float, default=1800.0, metavar="SECONDS", help=words)
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer; on GPUs --device cuda (default: 1)")
    words = "of an answer at most, half of them at least (default: 1000)"
    parser.add_argument("--answer", type=int, default=1000, metavar="TOKENS", help=words)
    words = "of the model over them, by megatron: tensor=2, pipeline=2, ... (default: FSDP2)"
    parser.add_argument("--layout", type=_axis, nargs="*", default=[], metavar="AXIS=N", help=words)
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
    parser.add_argument("--running", type=int, default=16, help="concurrent requests (default: 16)")
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
    parser.add_argument("--rounds", type=int, default=3, help="rounds; figures are medians over them (default: 3)")
    words = "measure with the experts of each token recorded, too, on a server that returns them"
    parser.add_argument("--routing", action="store_true", help=words)
    _add_server_options(parser, (*_DENSE, *_MIXTURES))
    _add_layers_option(parser)


def _add_layers_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=0, help="of the model (default: as many as the shape has)")


def _add_learner_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=_DENSE, default="tiny", help="Qwen3 (default: tiny)")
    _add_step_options(parser)
    parser.add_argument("--ranks", type=int, default=1, help="also measure this many ranks (default: 1, none)")
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
    cases = ["one", "bare", "looped", "replayed", "data", "tensor", "pipeline", "balanced", "context", "expert"]
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases[:4], help="default: those of one GPU")


def _add_step_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--tokens", type=int, default=8192, help="of a step and rank (default: 8192)")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192, help="of a pass (default: 8192)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; figures are medians over them (default: 5)")
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
    parser.add_argument("--rounds", type=int, default=5, help="rounds; figures are medians over them (default: 5)")


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


def _add_turns_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="turns; figures are medians over them (default: 5)")
    parser.add_argument("--device", default="cpu", help="that both have: cpu (default), cuda or cuda:N")
    parser.add_argument(
        "--size", type=int, nargs=2, default=(16, 32), metavar=("ROWS", "TOKENS"), help="of a step (default: 16 32)"
    )
    _add_server_options(parser)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", dest="model_path", type=Path, metavar="DIR", help="measure this model against transformers.generate"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of --model (default: float32)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds; figures are medians over them (default: 3)")


OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {  # of a measurement that has many
    "engine": _add_engine_options,
    "publication": _add_publication_options,
    "weights": _add_weights_options,
    "direct": _add_direct_options,
    "schedule": _add_schedule_options,
    "rescoring": _add_rescoring_options,
    "rollouts": _add_rollouts_options,
    "turns": _add_turns_options,
    "learner": _add_learner_options,
    "megatron": _add_megatron_options,
    "oracle": _add_oracle_options,
    "sessions": _add_sessions_options,
    "drafts": _add_drafts_options,
    "tastes": _add_tastes_options,
    "ray": _add_ray_options,
}
