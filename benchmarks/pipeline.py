"""Trajectories per second from prompt to packed batch, and CPU time per trajectory of every process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from asyncrl.config.settings import Config
from asyncrl.training.init_model import create_configured
from benchmarks.stage import Stage, bench_config
from topics.batches import BATCH_PACKED, BatchPacked
from topics.topic import BATCHES
from topics.wire import decode

LONG_TOKENS, SHORT_TOKENS = 4096, 16
_STEPS, _PUBLISH_EVERY = 1_000_000, 2
_WARM_S, _DEADLINE_S = 3.0, 120.0


def endless_config(run: str, model: Path, *, tokens: int, progress_tokens: int, **engine: Any) -> Config:
    """Return an endless run, with trajectories of this many tokens in 256 slots."""
    return bench_config(
        run,
        model={"path": str(model)},
        rollout={"slots": 256, "group_size": 8, "max_new_tokens": tokens, "progress_tokens": progress_tokens},
        buffer={"batch_groups": 16, "max_lag": 4},
        learner={"steps": _STEPS, "checkpoint_every": _STEPS, "publish_every": _PUBLISH_EVERY, "advantage": "none"},
        engine={"max_running": 256, "scripted_tokens": tokens, **engine},
    )


async def bench_pipeline(*, short: bool, seconds: float) -> dict[str, float]:
    """Measure a steady window of a run.

    Args:
        short: 16 tokens from the embedded engine over HTTP instead of 4k from a scripted one.
        seconds: length of the window, by the server's clock.

    Returns:
        Trajectories per second, and CPU microseconds per trajectory of every process.

    Raises:
        BenchError: an actor failed, or no batch was packed in time.
    """
    tokens, kind = (SHORT_TOKENS, "embedded") if short else (LONG_TOKENS, "scripted")
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        create_configured(model, Config())
        # A scripted answer comes in one piece, and workers publish progress only of streamed answers.
        config = endless_config("bench-pipeline", model, tokens=tokens, progress_tokens=tokens, kind=kind)
        async with Stage.open(config) as stage:
            await stage.enter_all()
            await stage.enter("prompter")
            return await stage.until(measure_window(stage, seconds, _WARM_S), _DEADLINE_S + seconds + _WARM_S)


async def measure_window(stage: Stage, seconds: float, warm_s: float) -> dict[str, float]:
    """Return rates, and CPU microseconds per trajectory of every process, in a window between two batches.

    Args:
        seconds: shortest length of the window; the window ends with the next batch.
        warm_s: seconds from the run's first batch to the earliest begin of the window.
    """
    earliest = await stage.follow(BATCHES, BATCH_PACKED, lambda record: True)
    first = await stage.follow(BATCHES, BATCH_PACKED, lambda record: record.time_ns >= earliest.time_ns + warm_s * 1e9)
    before = stage.cpu_s()
    last = await stage.follow(BATCHES, BATCH_PACKED, lambda record: record.time_ns >= first.time_ns + seconds * 1e9)
    after = stage.cpu_s()
    batches = [
        decode(BatchPacked, record.data)
        for record in await stage.read(BATCHES, [BATCH_PACKED])
        if first.time_ns < record.time_ns <= last.time_ns
    ]
    members = [member for batch in batches for group in batch.groups for member in group.members]
    span_s = (last.time_ns - first.time_ns) / 1e9
    figures = {
        "trajectories_per_s": len(members) / span_s,
        "batches_per_s": len(batches) / span_s,
        "tokens_per_trajectory": sum(member.tokens for member in members) / len(members),
    }
    for name in sorted(after):
        figures[f"{name}_cpu_us_per_trajectory"] = 1e6 * (after[name] - before.get(name, 0.0)) / len(members)
    return figures
