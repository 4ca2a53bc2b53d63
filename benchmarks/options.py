"""Options of the measurements with many options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.engine_settings import Capability, kinds_with
from asyncrl.config.sandbox_settings import SANDBOXES

_DENSE, _MIXTURES = ("tiny", "0.6b", "4b"), ("tiny-moe", "30b-a3b")  # shapes


def _add_tastes_options(parser: argparse.ArgumentParser) -> None:
    methods = ("binary", "distillation", "combine")
    parser.add_argument("--methods", nargs="+", choices=methods, default=list(methods), help="default: all")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], help="seeds, one run each (default: 1 to 5)"
    )
    parser.add_argument("--tastes", type=int, choices=(1, 2), default=1, help="tastes of the users (default: 1)")
    parser.add_argument("--steps", type=int, default=60, help="optimiser steps of a run (default: 60)")
    parser.add_argument(
        "--limit",
        dest="limit_s",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="time after which a run is asked to stop; 0 for none (default)",
    )
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs of about two cores each (default: 1)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all runs; repeatable"
    )


def _add_ray_options(parser: argparse.ArgumentParser) -> None:
    parts = ["rate", "join", "kills"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="default: all")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds; figures are medians (default: 3)")
    parser.add_argument("--kills", type=int, default=20, help="killed nodes, without the head (default: 20)")
    words = "limit for each run of the demo, each node that joins, all kills (default: 900)"
    parser.add_argument("--limit-s", type=float, default=900.0, metavar="SECONDS", help=words)


def _add_publication_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", choices=("tiny", "67m", "0.6b", "4b"), default="tiny", help="shape of a Qwen3 model (default: tiny)"
    )
    parser.add_argument("--directory", default="", metavar="FOLDER", help="folder on the disk to measure")
    parser.add_argument("--device", default="cpu", help="device: cpu (default), cuda or cuda:N")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds; figures are medians (default: 5)")
    parser.add_argument(
        "--size",
        type=int,
        nargs=2,
        default=(4, 64),
        metavar=("ROWS", "TOKENS"),
        help="rows of a step and tokens of each (default: 4 64)",
    )
    parser.add_argument("--checkpoints", type=int, default=5, help="number of checkpoints; 0 for none (default: 5)")
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
    parser.add_argument("--delta", action="store_true", help="publish versions as differences from the version before")
    parser.add_argument("--idle", action="store_true", help="begin each step after the last version has arrived")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds; figures are medians (default: 5)")
    words = "limit for each way, with the start of its server (default: 1800)"
    parser.add_argument("--deadline-s", type=float, default=1800.0, metavar="SECONDS", help=words)
    parser.add_argument(
        "--ranks", type=int, default=1, help="ranks of the trainer; on GPUs with --device cuda (default: 1)"
    )
    words = "greatest tokens of an answer; the least is half of it (default: 1000)"
    parser.add_argument("--answer", type=int, default=1000, metavar="TOKENS", help=words)
    words = "megatron layout of the model: tensor=2, pipeline=2, ... (default: FSDP2)"
    parser.add_argument("--layout", type=_axis, nargs="*", default=[], metavar="AXIS=N", help=words)
    _add_server_options(parser)
    _add_trainer_options(parser)


def _add_rescoring_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=800, help="tokens of an answer (default: 800)")
    parser.add_argument("--crossed", type=int, default=3, help="updates during an answer (default: 3)")
    parser.add_argument(
        "--lr", type=float, default=1e-3, help="learning rate of the steps between updates (default: 1e-3)"
    )
    _add_server_options(parser)
    _add_trainer_options(parser)


def _add_drafts_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arguments", default="", help="arguments of SGLang, as on a command line")
    parser.add_argument("--pythonpath", default="", metavar="FOLDERS", help="folders from which SGLang is imported")
    parser.add_argument("--prompts", type=int, default=64, help="concurrent requests (default: 64)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an answer (default: 256)")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: 200)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 1e-3)")


def _add_sessions_options(parser: argparse.ArgumentParser) -> None:
    ways, updates = ("files", "staged", "ipc", "nccl", "gloo"), ("in_place", "resume")
    parser.add_argument("--way", choices=ways, default="files", help="way of the versions (default: files)")
    parser.add_argument("--updates", nargs="+", choices=updates, default=list(updates), help="default: both")
    parser.add_argument("--sessions", type=int, default=16, help="concurrent sessions (default: 16)")
    parser.add_argument("--gateways", type=int, default=1, help="gateway processes (default: 1)")
    parser.add_argument("--clients", type=int, default=1, help="client processes that share the sessions (default: 1)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a reply (default: 128)")
    parser.add_argument("--versions", type=int, default=20, help="versions of a window (default: 20)")
    words = "time between two steps; longer if a version takes longer (default: 2)"
    parser.add_argument("--every-s", type=float, default=2.0, metavar="SECONDS", help=words)
    words = "publish the first weights as every version, so that no training step slows the server"
    parser.add_argument("--still", action="store_true", help=words)
    _add_server_options(parser)
    parser.add_argument("--device", default="cpu", help="device of the trainer: cpu (default), cuda or cuda:N")
    parser.add_argument("--gpus", type=int, nargs="*", default=[], metavar="N", help="GPUs of the server")
    parser.add_argument(
        "--size",
        type=int,
        nargs=2,
        default=(4, 64),
        metavar=("ROWS", "TOKENS"),
        help="rows and tokens of a step (default: 4 64)",
    )


def _add_trainer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="device of the trainer: cpu (default), cuda or cuda:N")
    parser.add_argument("--gpus", type=int, nargs="*", default=[], metavar="N", help="GPUs of the server")
    parser.add_argument("--running", type=int, default=16, help="concurrent requests (default: 16)")
    parser.add_argument(
        "--size",
        type=int,
        nargs=2,
        default=(4, 64),
        metavar=("ROWS", "TOKENS"),
        help="rows and tokens of a step (default: 4 64)",
    )


def _add_server_options(parser: argparse.ArgumentParser, shapes: Sequence[str] = _DENSE) -> None:
    parser.add_argument("--kind", choices=("embedded", "sglang"), default="embedded", help="kind of the server")
    parser.add_argument("--shape", choices=shapes, default="tiny", help="shape of a Qwen3 model (default: tiny)")
    parser.add_argument("--arguments", default="", help="arguments of SGLang, as on a command line")
    parser.add_argument("--pythonpath", default="", metavar="FOLDERS", help="folders from which SGLang is imported")


def _add_rollouts_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--concurrent",
        type=int,
        nargs="+",
        default=[16, 64],
        metavar="N",
        help="concurrent trajectories (default: 16 64)",
    )
    parser.add_argument("--workers", type=int, default=1, help="rollout workers that share them (default: 1)")
    parser.add_argument("--tokens", type=int, default=200, help="mean tokens of a generation (default: 200)")
    parser.add_argument("--turns", type=int, default=1, help="generations of a trajectory (default: 1)")
    parser.add_argument("--tool-s", type=float, default=0.05, help="seconds between two turns (default: 0.05)")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a window (default: 15)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds; figures are medians (default: 3)")
    words = "also measure with the experts of each token, on a server that returns them"
    parser.add_argument("--routing", action="store_true", help=words)
    _add_server_options(parser, (*_DENSE, *_MIXTURES))
    _add_layers_option(parser)


def _add_loop_options(parser: argparse.ArgumentParser) -> None:
    kinds = ("scripted", *kinds_with(Capability.PROCESSES))
    parser.add_argument("--kind", choices=kinds, default="scripted", help="kind of the engine (default: scripted)")
    words = "trainer (default: scripted)"
    parser.add_argument("--trainer", choices=("scripted", "torch", "megatron"), default="scripted", help=words)
    parser.add_argument("--shape", choices=_DENSE, default="tiny", help="shape of a Qwen3 model (default: tiny)")
    parser.add_argument("--device", default="cpu", help="device of the trainer: cpu (default), cuda or cuda:N")
    parser.add_argument("--arguments", default="", help="arguments of the server, as on a command line")
    parser.add_argument("--pythonpath", default="", metavar="FOLDERS", help="folders from which the server is imported")
    parser.add_argument("--slots", default="auto", help="rollout.slots (default: auto)")
    parser.add_argument("--batch", type=int, default=32, help="groups of a batch (default: 32)")
    parser.add_argument("--group", type=int, default=8, help="trajectories of a group (default: 8)")
    parser.add_argument("--lag", type=int, default=2, help="buffer.max_lag (default: 2)")
    parser.add_argument("--mean", type=int, default=1000, help="mean tokens of an answer (default: 1000)")
    parser.add_argument("--sigma", type=float, default=0.8, help="sigma of the logarithm of lengths (default: 0.8)")
    parser.add_argument("--most", type=int, default=4096, help="most tokens of an answer (default: 4096)")
    parser.add_argument("--update", choices=("resume", "in_place"), default="resume", help="default: resume")
    parser.add_argument("--warm", type=int, default=6, help="steps before the window (default: 6)")
    parser.add_argument("--steps", type=int, default=20, help="steps of the window (default: 20)")
    parser.add_argument("--synchronous", action="store_true", help="also measure the run with max_lag = 0")
    words = "concurrent requests of the engine alone (default: 64 128 256)"
    parser.add_argument("--sweep", type=int, nargs="*", default=[64, 128, 256], metavar="N", help=words)
    parser.add_argument("--sweep-s", type=float, default=15.0, help="seconds of each of these windows (default: 15)")
    words = "times that a scripted engine and trainer are faster than the measured SGLang and H200 (default: 4)"
    parser.add_argument("--speed", type=float, default=4.0, help=words)
    words = "tokens/s of a scripted trainer at speed 1 (default: 75000)"
    parser.add_argument("--train-rate", type=float, default=75_000.0, help=words)
    words = "seconds of an update of a scripted engine at speed 1 (default: 0.4)"
    parser.add_argument("--update-s", type=float, default=0.4, help=words)
    words = "another setting of the run; repeatable"
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help=words)


def _add_layers_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=0, help="layers of the model (default: those of the shape)")


def _add_learner_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=_DENSE, default="tiny", help="shape of a Qwen3 model (default: tiny)")
    _add_step_options(parser)
    parser.add_argument("--ranks", type=int, default=1, help="also measure this many ranks (default: 1, none)")
    kinds = ["asyncrl", "bare", "masters"]
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=kinds,
        default=kinds[:2],
        help="masters is bare with float32 masters (default: asyncrl bare)",
    )


def _add_megatron_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", choices=(*_DENSE, *_MIXTURES), default="tiny", help="shape of a Qwen3 model (default: tiny)"
    )
    _add_layers_option(parser)
    _add_step_options(parser)
    cases = ["one", "bare", "looped", "replayed", "data", "tensor", "pipeline", "balanced", "context", "expert"]
    parser.add_argument(
        "--cases", nargs="+", choices=cases, default=cases[:4], help="default: one bare looped replayed"
    )


def _add_step_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="device: cpu (default) or cuda")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a step and rank (default: 8192)")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192, help="tokens of a pass (default: 8192)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds; figures are medians (default: 5)")
    rows = ["even", "mixed"]
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows, help="default: even mixed")
    parser.add_argument(
        "--options",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="settings of the trainer, for example recompute=true",
    )


def _add_oracle_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="demo", help="config file, or name of a shipped config (default: demo)")
    parser.add_argument("--lags", type=int, nargs="*", default=[0, 1, 2, 4, 8], help="lag bounds (default: 0 1 2 4 8)")
    parser.add_argument(
        "--uncorrected",
        type=int,
        nargs="*",
        default=[8],
        help="bounds that are also measured without correction (default: 8)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[1, 2, 3],
        help="seeds of prompts and draws, one run each (default: 1 2 3)",
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of all runs; repeatable",
    )
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs of one to two cores each (default: 1)")
    parser.add_argument(
        "--output",
        type=os.path.abspath,
        metavar="FOLDER",
        help="folder for oracle.jsonl, oracle.md and oracle.png; curves in oracle.jsonl are not measured again",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="stop unfinished runs after this time (default: none)",
    )


def _add_weights_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", choices=("files", "stream"), default="files", help="store of the versions (default: files)"
    )
    parser.add_argument("--mib", type=int, choices=(8, 256), default=256, help="size of a version (default: 256)")
    parser.add_argument(
        "--changed",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of elements changed by a step; versions are then differences (default: full versions)",
    )
    parser.add_argument("--engines", type=int, default=8, help="embedded engines on this host (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds; figures are medians (default: 5)")


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
        "--parallel", type=int, default=0, help="concurrent runs; 0 (default) for 15 at 10 s, 5 at 1 s, else 1"
    )


def _add_turns_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="number of turns; figures are medians (default: 5)")
    parser.add_argument("--device", default="cpu", help="shared device: cpu (default), cuda or cuda:N")
    parser.add_argument(
        "--size",
        type=int,
        nargs=2,
        default=(16, 32),
        metavar=("ROWS", "TOKENS"),
        help="rows and tokens of a step (default: 16 32)",
    )
    _add_server_options(parser)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", dest="model_path", type=Path, metavar="DIR", help="compare this model with transformers.generate"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="float type of --model (default: float32)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds; figures are medians (default: 3)")


def _add_sandbox_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=SANDBOXES, default="bubblewrap", help="default: bubblewrap")
    parser.add_argument("--starts", type=int, default=200, help="sandboxes to start (default: 200)")
    parser.add_argument("--running", type=int, default=4, help="sandboxes that start at once (default: 4)")
    parser.add_argument("--programs", type=int, default=300, help="programs in one sandbox (default: 300)")


def _add_session_options(parser: argparse.ArgumentParser) -> None:
    words = "lengths of histories (default: 4096 65536)"
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 65536], metavar="N", help=words)
    parser.add_argument("--calls", type=int, default=30, help="calls at each length (default: 30)")
    parser.add_argument("--idle", type=int, default=500, help="idle sessions (default: 500)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the idle window (default: 10)")


OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {  # by measurement
    "engine": _add_engine_options,
    "publication": _add_publication_options,
    "weights": _add_weights_options,
    "direct": _add_direct_options,
    "schedule": _add_schedule_options,
    "rescoring": _add_rescoring_options,
    "rollouts": _add_rollouts_options,
    "loop": _add_loop_options,
    "turns": _add_turns_options,
    "learner": _add_learner_options,
    "megatron": _add_megatron_options,
    "oracle": _add_oracle_options,
    "sessions": _add_sessions_options,
    "drafts": _add_drafts_options,
    "tastes": _add_tastes_options,
    "ray": _add_ray_options,
    "sandbox": _add_sandbox_options,
    "session": _add_session_options,
}
