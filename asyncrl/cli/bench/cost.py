"""What resumability costs while nothing fails: CPU time per trajectory with progress messages, against none."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from asyncrl.cli.bench.pipeline import measure_window
from asyncrl.cli.bench.stage import Stage, make_model
from asyncrl.settings import (
    BufferSettings,
    Cast,
    EngineSettings,
    LearnerSettings,
    ModelSettings,
    RecorderSettings,
    RolloutSettings,
)

_TOKENS, _MEAN_S, _SIGMA = 8000, 8.0, 0.3  # of a generation, streamed
_GROUPS, _GROUP_SIZE, _LAG, _STEPS = 16, 8, 4, 1_000_000
_OFF = 1_000_000  # tokens that no trajectory reaches
_WARM_S, _DEADLINE_S = 10.0, 120.0


def cost_cast(model: Path, progress_tokens: int) -> Cast:
    """A run that never ends: a scripted engine streams 8,000 tokens in 8 s to each of 256 slots."""
    return Cast(
        run="bench-cost",
        model=ModelSettings(path=str(model)),
        rollout=RolloutSettings(
            slots=256, group_size=_GROUP_SIZE, max_new_tokens=_TOKENS, progress_tokens=progress_tokens
        ),
        buffer=BufferSettings(batch_groups=_GROUPS, max_lag=_LAG),
        learner=LearnerSettings(
            trainer="scripted", steps=_STEPS, checkpoint_every=_STEPS, publish_every=2, advantage="none"
        ),
        engine=EngineSettings(kind="scripted", scripted_mean_s=_MEAN_S, scripted_sigma=_SIGMA, scripted_tokens=_TOKENS),
        recorder=RecorderSettings(plot=False),
    )


async def bench_cost(
    *, pairs: int = 15, seconds: float = 12.0, told: Callable[[str], None] = lambda _: None
) -> dict[str, float]:
    """Measure pairs of runs, one with progress messages and one without, one after the other.

    Args:
        pairs: runs of each kind.
        seconds: length of each measured window.
        told: hears of each pair.

    Returns:
        Medians of CPU microseconds per trajectory over all processes, with and without, and of the pairs' ratios.

    Raises:
        BenchError: a run did not come to its window.
    """
    default = RolloutSettings().progress_tokens
    costs: dict[int, list[float]] = {default: [], _OFF: []}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        await make_model(model, Cast())
        for pair in range(pairs):
            # Who comes first changes, so that a machine that slows down favours nobody.
            for progress_tokens in sorted(costs, reverse=bool(pair % 2)):
                costs[progress_tokens].append(await _cpu_us(model, progress_tokens, seconds))
            on, off = costs[default][-1], costs[_OFF][-1]
            told(f"pair {pair + 1}: {on:,.0f} and {off:,.0f} CPU microseconds per trajectory")
    ratios = [on / off for on, off in zip(costs[default], costs[_OFF], strict=True)]
    return {
        "pairs": float(pairs),
        "progress_tokens": float(default),
        "with_progress_cpu_us_per_trajectory": statistics.median(costs[default]),
        "without_progress_cpu_us_per_trajectory": statistics.median(costs[_OFF]),
        "progress_cost_share": statistics.median(ratios) - 1,
    }


async def _cpu_us(model: Path, progress_tokens: int, seconds: float) -> float:
    async with Stage.open(cost_cast(model, progress_tokens)) as stage:
        await stage.enter_all()
        await stage.enter("prompter")
        figures = await stage.until(measure_window(stage, seconds, _WARM_S), _DEADLINE_S + seconds)
    return sum(value for name, value in figures.items() if name.endswith("_cpu_us_per_trajectory"))
