"""The learner's trainer at one model size, compared with a bare loop on the same rows, and two GPUs with one.

Every measurement is a separate process (`benchmarks/learner_process.py`); a failed process costs only its figures.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.algorithms.balance import Work
from asyncrl.training.ranks import work_of
from benchmarks.clone import ROOT, environment
from benchmarks.learner_process import Measured, Measurement
from benchmarks.random_model import SHAPES, write_random_model

_LIMIT_S = 400.0  # of one measurement
_LONGEST = {"tiny": 64}  # tokens of a row; other shapes have 8,192


def bench_learner(
    *, shape: str, tokens: int, ranks: int, kinds: Sequence[str], rows: Sequence[str], **options: Any
) -> dict[str, float]:
    """Measure steps of the trainer.

    Args:
        shape: a name in `SHAPES`.
        tokens: tokens of a step.
        ranks: number of ranks of the second measurement; 1 for none.
        kinds: "asyncrl"; "bare"; "masters", a bare loop with float32 masters of the weights, as the trainer has.
        rows: "even" (all of the longest length), "mixed" (lognormal lengths) or both.
        options: more fields of `Measurement`; its `options` are "NAME=VALUE" of `TorchSettings`.

    Returns:
        Tokens per second, the share of the matrix rate (`mfu`), seconds of the first step and memory, by shape, kind
        and rows. With several ranks also the differences of loss and gradient norm of one step from those of one rank
        on the same rows.
    """
    longest = _LONGEST.get(shape, 8192)
    lengths = {"even": [longest] * max(tokens // longest, 1), "mixed": mixed_lengths(tokens, longest)}
    lengths = {name: lengths[name] for name in rows}
    figures: dict[str, float] = {}
    compared: dict[int, dict[str, float]] = {}  # by the number of ranks
    own = dict(option.split("=", 1) for option in options.pop("options"))
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        model = Path(scratch) / "model"
        write_random_model(model, SHAPES[shape], context=longest)
        for kind, count in [*((kind, 1) for kind in kinds), *([("asyncrl", ranks)] if ranks > 1 else [])]:
            measurement = Measurement(
                kind=kind,
                model=str(model),
                lengths=lengths,
                ranks=count,
                compared=ranks if ranks > 1 and kind == "asyncrl" else 0,
                options=own if kind == "asyncrl" else {},
                **options,
            )
            name = kind if count == 1 else f"{kind}_{count}_ranks"
            found = measured(measurement, Path(scratch) / name)
            figures |= {f"{name}_{key}": value for key, value in figures_of(found, work_of(model), count).items()}
            compared |= {count: found.compared} if found.compared else {}
    figures |= _shares(figures, list(lengths), ranks)
    for name in ("loss", "grad_norm") if len(compared) > 1 else ():
        one, several = compared[1][name], compared[ranks][name]
        figures[f"{ranks}_ranks_{name}_relative_difference"] = abs(several - one) / abs(one)
    return {f"{shape.replace('.', '_')}_{name}": value for name, value in figures.items()}


def mixed_lengths(tokens: int, longest: int) -> list[int]:
    """Return lognormal lengths between 64 (or 4) and `longest` that add up to about `tokens`; always the same."""
    rng, lengths = np.random.default_rng(0), list[int]()
    while sum(lengths) < tokens:
        drawn = rng.lognormal(np.log(longest / 8), 1.0)
        lengths.append(int(np.clip(drawn, max(longest // 128, 4), longest)))
    return lengths


def measured(measurement: Measurement, folder: Path, module: str = "learner_process") -> Measured:
    """Run the processes of a measurement; report failures on stderr."""
    folder.mkdir()
    processes = []
    for rank in range(measurement.ranks):
        given = msgspec.structs.replace(measurement, rank=rank, rendezvous=str(folder / "ranks"))
        words = [sys.executable, "-m", f"benchmarks.{module}", msgspec.json.encode(given).decode()]
        output = (folder / f"{rank}.json").open("wb")
        processes.append(subprocess.Popen(words, stdout=output, env=environment(GLOO_SOCKET_IFNAME="lo"), cwd=ROOT))
    try:
        for process in processes:
            process.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"{folder.name}: not finished after {_LIMIT_S:.0f} s", file=sys.stderr)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    lines = (folder / "0.json").read_bytes().splitlines()  # figures from before a failure count
    parts = [msgspec.json.decode(line, type=Measured) for line in lines if line.startswith(b"{")]
    merged = Measured()
    for part in parts:
        part.rows = merged.rows | part.rows
        merged = part
    return merged


def figures_of(found: Measured, work: Work, ranks: int) -> dict[str, float]:
    """Return rates, and shares of the matrix rate, of a measurement."""
    figures = {"matmul_tflops": found.matmul_flops / 1e12} if found.matmul_flops else {}
    for name, rows in found.rows.items():
        operations = sum(map(work.of, rows.lengths))
        figures |= {
            f"{name}_tokens_per_s": sum(rows.lengths) / rows.step_s,
            f"{name}_step_s": rows.step_s,
            f"{name}_tflops": operations / rows.step_s / ranks / 1e12,
            f"{name}_mfu": operations / rows.step_s / ranks / found.matmul_flops,
            f"{name}_first_step_s": rows.first_step_s,
        }
        figures |= {f"{name}_peak_gib": rows.peak_bytes / 2**30} if rows.peak_bytes else {}
    return figures


def _shares(figures: dict[str, float], rows: Sequence[str], ranks: int) -> dict[str, float]:
    """Return the ratio of the trainer to the bare loop, and to itself on one rank."""
    shares = {}
    for name in rows:
        own = figures.get(f"asyncrl_{name}_tokens_per_s")
        several = figures.get(f"asyncrl_{ranks}_ranks_{name}_tokens_per_s")
        for kind in ("bare", "masters"):
            if own and (other := figures.get(f"{kind}_{name}_tokens_per_s")):
                shares[f"{name}_share_of_{kind}"] = own / other
        if own and several:
            shares[f"{name}_{ranks}_ranks_over_one"] = several / own
    return shares
