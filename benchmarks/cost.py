"""The cost of resumability while nothing fails: CPU time per trajectory with progress messages, against none."""

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
        BenchError: a run did not come to its window, or stored other progress than it should.
    """
    default = RolloutSettings(max_new_tokens=tokens).progress_limit
    costs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        # Answers must fit into the model's context: where no more is expected, progress is not worth its message.
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
        return await stage.until(_measure(stage, seconds), _DEADLINE_S + seconds)


async def _measure(stage: Stage, seconds: float) -> float:
    """CPU microseconds of all processes for as many sampled tokens as a trajectory has.

    Trajectories that began together end together, in waves of 8 s: how many end in a window says little of the work
    that was done in it. Tokens come evenly.

    Raises:
        BenchError: progress was stored where none should be, or none where it should.
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
    """Return the first vital signs of the rollout worker from a time on that report more than `above` tokens."""

    def wanted(record: Record) -> bool:
        if record.time_ns < earliest_ns:
            return False
        vitals = _vitals(record)
        return vitals.role == "rollout" and vitals.values["tokens"] > above

    return _vitals(await stage.follow(VITALS, VITALS_TAKEN, wanted))


def _vitals(record: Record) -> Vitals:
    vitals: Vitals = decode_body(VITALS_TAKEN, record.data)
    return vitals
