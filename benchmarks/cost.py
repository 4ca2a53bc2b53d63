"""The cost of resumability without failures: CPU time per trajectory with and without progress messages."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path

import msgspec

from asyncrl.bus.log import Record
from asyncrl.bus.publish import decode_body
from asyncrl.config.settings import Config, RolloutSettings
from asyncrl.training.init_model import create_configured
from benchmarks.pipeline import endless_config
from benchmarks.stage import BenchError, Stage, report
from topics.actors import VITALS_TAKEN, Vitals
from topics.batches import BATCH_PACKED
from topics.topic import BATCHES, VITALS

_MEAN_S, _SIGMA = 8.0, 0.3  # of a generation, streamed
_OFF = 1_000_000  # more tokens than any trajectory has
_WARM_S, _DEADLINE_S = 10.0, 120.0


def cost_config(model: Path, progress_tokens: int, tokens: int) -> Config:
    """Return an endless run: a scripted engine streams `tokens` tokens in 8 s to each of 256 slots."""
    streaming = {"kind": "scripted", "scripted_mean_s": _MEAN_S, "scripted_sigma": _SIGMA}
    return endless_config("bench-cost", model, tokens=tokens, progress_tokens=progress_tokens, **streaming)


async def bench_cost(*, pairs: int, seconds: float, tokens: int) -> dict[str, float]:
    """Measure pairs of runs side by side, one with progress messages and one without.

    Both runs of a pair share the machine: its speed changes by a tenth per minute, which is more than the measured
    difference.

    Args:
        pairs: number of runs of each kind.
        seconds: length of each measured window.
        tokens: of a trajectory.

    Returns:
        Medians of CPU microseconds per trajectory over all processes, with and without progress, and of the pairs'
        ratios.

    Raises:
        BenchError: a run did not reach its window, or stored more or less progress than expected.
    """
    default = RolloutSettings(max_new_tokens=tokens).progress_limit
    costs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        # Answers must fit into the model's context: near its end, a worker publishes no more progress.
        create_configured(model, msgspec.convert({"model": {"create": {"context": 2 * tokens}}}, Config))
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
        return await stage.until(cpu_us_per_trajectory(stage, seconds), _DEADLINE_S + seconds)


async def cpu_us_per_trajectory(stage: Stage, seconds: float) -> float:
    """Return CPU microseconds of all processes per sampled trajectory length.

    The figure counts tokens, which arrive evenly. Trajectories that began together end together, in waves of 8 s, so
    their number in a window is no good measure of the work.

    Raises:
        BenchError: the stored progress does not match the setting.
    """
    earliest = await stage.follow(BATCHES, BATCH_PACKED, lambda record: True)
    first = await _sampled(stage, earliest.time_ns + _WARM_S * 1e9)
    before = stage.cpu_s()
    last = await _sampled(stage, first.at_s * 1e9 + seconds * 1e9, above=first.values["tokens"])
    after = stage.cpu_s()
    settings, stored = stage.config.rollout, last.values.get("progressed", 0.0)
    if bool(stored) != (settings.progress_limit < settings.max_new_tokens):
        raise BenchError(f"{stored:g} entries of progress at a limit of {settings.progress_limit} tokens each")
    trajectories = (last.values["tokens"] - first.values["tokens"]) / settings.max_new_tokens
    return 1e6 * sum(after[name] - before.get(name, 0.0) for name in after) / trajectories


async def _sampled(stage: Stage, earliest_ns: float, *, above: float = -1.0) -> Vitals:
    """Return the rollout worker's first vital signs after `earliest_ns` that report more than `above` tokens."""

    def wanted(record: Record) -> bool:
        if record.time_ns < earliest_ns:
            return False
        vitals = _vitals(record)
        return vitals.role == "rollout" and vitals.values["tokens"] > above

    return _vitals(await stage.follow(VITALS, VITALS_TAKEN, wanted))


def _vitals(record: Record) -> Vitals:
    vitals: Vitals = decode_body(VITALS_TAKEN, record.data)
    return vitals
