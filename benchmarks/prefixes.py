"""Seconds of a step of the torch trainer on groups of answers to one prompt, with shared prefixes and without.

`python -m benchmarks.prefixes --shape 4b --device cuda` prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.algorithms.losses import loss_of
from asyncrl.algorithms.rows import TrainRow
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from benchmarks.random_model import SHAPES, write_random_model
from topics.batches import Objective

_OBJECTIVE = Objective(learning_rate=1e-6)
_COMPARED = 4096  # first entries of the gradient of each tensor
_WARM = 2  # steps that are not counted: the first compiles, the second still reserves memory


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="shape of a Qwen3 model")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    for name, default in (("groups", 4), ("members", 8), ("prompt", 2000), ("answer", 500), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--dtype", default="", help="float32 or bfloat16 (default: bfloat16 on GPUs)")
    parser.add_argument("--recompute", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        model = Path(scratch) / "model"
        write_random_model(model, SHAPES[given.shape], context=given.prompt + given.answer)
        rows = group_rows(given, SHAPES[given.shape].vocabulary)
        found = {name: measure(model, rows, given, shared=shared) for name, shared in _KINDS}
    apart, shared = (found[name] for name, _ in _KINDS)
    gradients = apart.pop("gradient"), shared.pop("gradient")
    difference = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
    figures = {**found, "step_time": shared["step_s"] / apart["step_s"], "gradient_difference": difference}
    print(json.dumps(figures))


_KINDS = (("apart", False), ("shared", True))


def group_rows(given: argparse.Namespace, vocabulary: int) -> list[TrainRow]:
    """Rows of random tokens: of each group one prompt, and answers of half to all of the length."""
    rng, rows = np.random.default_rng(0), []
    for group in range(given.groups):
        prompt = rng.integers(3, vocabulary, given.prompt)
        for member in range(given.members):
            size = int(rng.integers(given.answer // 2, given.answer + 1))
            tokens = np.concatenate((prompt, rng.integers(3, vocabulary, size))).astype(np.int32)
            mask = (np.arange(len(tokens)) >= given.prompt).astype(np.uint8)
            rows.append(
                TrainRow(
                    trajectory_id=f"{group}-{member}",
                    tokens=tokens,
                    mask=mask,
                    logprobs=np.full(len(tokens), -np.log(vocabulary), np.float32) * mask,
                    versions=np.where(mask, 0, -1).astype(np.int32),
                    advantages=np.full(len(tokens), float(rng.normal()), np.float32),
                    weights=np.full(len(tokens), 1.0 / (given.groups * given.members * given.answer), np.float32),
                )
            )
    return rows


def measure(model: Path, rows: list[TrainRow], given: argparse.Namespace, *, shared: bool) -> dict[str, Any]:
    """Figures of one trainer, and a part of its first gradient."""
    cuda = given.device.startswith("cuda")
    dtype: Any = given.dtype or ("bfloat16" if cuda else "float32")
    settings = TorchSettings(
        device=given.device,
        dtype=dtype,
        micro_batch_tokens=given.micro_batch_tokens,
        compiled=cuda and dtype != "float32",
        recompute=given.recompute,
        share_prefixes=shared,
    )
    trainer = TorchTrainer(model, settings)
    _, norm = trainer._gradient(trainer._passes.cut(rows), loss_of(_OBJECTIVE))
    kept = torch.cat([one.flatten()[:_COMPARED].float().cpu() for one in trainer._own._gradients()])
    trainer._own.forget()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times, figures = [], dict[str, float]()
    for _ in range(_WARM + given.rounds):
        began = time.monotonic()
        figures = trainer.step(rows, _OBJECTIVE)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    found = {
        "step_s": statistics.median(times[_WARM:]),
        "first_step_s": times[0],
        "grad_norm": norm,
        "tokens_computed": figures["tokens_computed"],
        "tree_ratio": figures["tree_ratio"],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
    }
    del trainer
    if cuda:
        torch.cuda.empty_cache()
    return {**found, "gradient": kept}


if __name__ == "__main__":
    main()
