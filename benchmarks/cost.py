"""The cost of resumability while nothing fails: CPU time per trajectory with progress messages, against none."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path

from asyncrl.config.settings import Config, RolloutSettings
from asyncrl.training.create import create_configured
from benchmarks.pipeline import endless_config, measure_window
from benchmarks.stage import Stage, report

_MEAN_S, _SIGMA = 8.0, 0.3  # of a generation, streamed
_OFF = 1_000_000  # tokens that no trajectory reaches
_WARM_S, _DEADLINE_S = 10.0, 120.0


def cost_config(model: Path, progress_tokens: int, tokens: int) -> Config:
    """A run that never ends: a scripted engine streams so many tokens in 8 s to each of 256 slots."""
    streaming = {"kind": "scripted", "scripted_mean_s": _MEAN_S, "scripted_sigma": _SIGMA}
    return endless_config("bench-cost", model, tokens=tokens, progress_tokens=progress_tokens, **streaming)


async def bench_cost(*, pairs: int, seconds: float, tokens: int) -> dict[str, float]:
    """Measure pairs of runs side by side, one with progress messages and one without.

    Both runs of a pair share the machine: its speed changes by a tenth from minute to minute, which is more than what
    is looked for.

    Args:
        pairs: runs of each kind.
        seconds: length of each measured window.
        tokens: of a trajectory.

    Returns:
        Medians of CPU microseconds per trajectory over all processes, with and without, and of the pairs' ratios.

    Raises:
        BenchError: a run did not come to its window.
    """
    default = RolloutSettings(max_new_tokens=tokens).progress_limit
    costs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        create_configured(model, Config())
        configs = [cost_config(model, progress_tokens, tokens) for progress_tokens in (default, _OFF)]
        for pair in range(pairs):
            on, off = await asyncio.gather(*(_cpu_us(config, seconds) for config in configs))
            costs.append((on, off))
            report(f"pair {pair + 1}: {on:,.0f} and {off:,.0f} CPU microseconds per trajectory")
    return {
        "pairs": float(pairs),
        "tokens_per_trajectory": float(tokens),
        "progress_tokens": float(default),
        "with_progress_cpu_us_per_trajectory": statistics.median(on for on, _ in costs),
        "without_progress_cpu_us_per_trajectory": statistics.median(off for _, off in costs),
        "progress_cost_share": statistics.median(on / off for on, off in costs) - 1,
    }


async def _cpu_us(config: Config, seconds: float) -> float:
    async with Stage.open(config) as stage:
        await stage.enter_all()
        await stage.enter("prompter")
        figures = await stage.until(measure_window(stage, seconds, _WARM_S), _DEADLINE_S + seconds)
    return sum(value for name, value in figures.items() if name.endswith("_cpu_us_per_trajectory"))
