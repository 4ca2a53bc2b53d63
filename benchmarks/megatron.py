"""The megatron trainer at one model size: compared with a bare loop, on two GPUs, with experts and replay.

Every case is a separate process for each GPU (`benchmarks/megatron_process.py`). A failed case costs only its figures;
each case prints its figures on stderr as soon as it ends.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.ranks import work_of
from benchmarks.learner import figures_of, measured, mixed_lengths
from benchmarks.megatron_process import Case
from benchmarks.random_model import SHAPES, write_random_model

_LONGEST = {"tiny": 64, "tiny-moe": 64}  # tokens of a row; other shapes have 8,192


class _How(NamedTuple):
    """Settings by which a case differs from the trainer on one GPU."""

    kind: str = "megatron"
    ranks: int = 1
    layout: Layout = Layout()


CASES = {
    "one": _How(),
    "bare": _How("bare"),
    "looped": _How("looped"),
    "replayed": _How("replayed"),
    "data": _How(ranks=2),
    "tensor": _How(ranks=2, layout=Layout(tensor=2)),
    "pipeline": _How(ranks=2, layout=Layout(pipeline=2)),
    "balanced": _How(ranks=2, layout=Layout(pipeline=2, head=2)),
    "context": _How(ranks=2, layout=Layout(context=2)),
    "expert": _How(ranks=2, layout=Layout(expert=2)),
}
"""By name: one GPU; a hand-written loop; experts one after another; experts named by rows; two GPUs."""
_OF_EXPERTS = ("looped", "replayed", "expert")


def bench_megatron(
    *,
    shape: str,
    layers: int,
    tokens: int,
    cases: Sequence[str],
    rows: Sequence[str],
    options: Sequence[str],
    **how: Any,
) -> dict[str, float]:
    """Measure steps of the trainer.

    Args:
        shape: a name in `SHAPES`.
        layers: layers of the model; 0 for as many as the shape has.
        tokens: tokens of a step and GPU.
        cases: names in `CASES`; models without experts skip the cases about experts.
        rows: "even" (all of the longest length), "mixed" (lognormal lengths) or both.
        options: "NAME=VALUE" of `MegatronSettings`, for all cases but the bare loop.
        how: more fields of `Case`.

    Returns:
        By case and rows: tokens per second, the share of the matrix rate (`mfu`, which counts the active experts of a
        token), gigabytes of weights per second to host memory, and memory. Also the ratios between cases.
    """
    longest = _LONGEST.get(shape, 8192)
    lengths = {"even": [longest] * max(tokens // longest, 1), "mixed": mixed_lengths(tokens, longest)}
    model_shape = SHAPES[shape]
    model_shape = model_shape._replace(layers=layers or model_shape.layers)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        model = Path(scratch) / "model"
        write_random_model(model, model_shape, context=longest)
        for name in cases:
            if name in _OF_EXPERTS and model_shape.experts is None:
                continue
            one = CASES[name]
            case = Case(
                kind=one.kind,
                model=str(model),
                lengths={key: lengths[key] for key in rows},
                ranks=one.ranks,
                layout=one.layout,
                options=dict(option.split("=", 1) for option in options),
                **how,
            )
            found = measured(case, Path(scratch) / name, "megatron_process")
            own = {f"{name}_{key}": value for key, value in figures_of(found, work_of(model), one.ranks).items()}
            if found.export_s:
                own[f"{name}_export_gb_per_s"] = found.export_bytes / found.export_s / 1e9
            print(f"{name}: {own or 'failed'}", file=sys.stderr, flush=True)
            figures |= own
    figures |= _compared(figures, rows)
    prefix = shape.replace(".", "_").replace("-", "_")
    return {f"{prefix}_{name}": value for name, value in figures.items()}


def _compared(figures: dict[str, float], rows: Sequence[str]) -> dict[str, float]:
    """Return ratios: one GPU to the bare loop and to looped experts; replay and two GPUs to one GPU."""
    found = {}
    for name in rows:
        rates = {case: figures[key] for case in CASES if (key := f"{case}_{name}_tokens_per_s") in figures}
        one = rates.pop("one", 0.0)
        if not one:
            continue
        for case, rate in rates.items():
            inverted = case in ("bare", "looped")
            found[f"{name}_one_over_{case}" if inverted else f"{name}_{case}_over_one"] = (
                one / rate if inverted else rate / one
            )
    return found
