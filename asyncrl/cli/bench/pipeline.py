"""Trajectories per second from prompt to packed batch, and what each costs every process in CPU time."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

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
from asyncrl.training.scripted import ScriptedTrainer
from asyncrl.weights.files import FileStore
from topics.batches import BATCH_PACKED, BatchPacked
from topics.topic import BATCHES
from topics.wire import decode

LONG_TOKENS, SHORT_TOKENS = 4096, 16
_GROUPS, _GROUP_SIZE, _LAG = 16, 8, 4
_STEPS, _PUBLISH_EVERY = 1_000_000, 2
_VERSIONS = 200  # that an embedded engine finds: enough for 50,000 trajectories
_DEADLINE_S = 120.0


def pipeline_cast(model: Path, *, short: bool) -> Cast:
    """A run that never ends: an instant engine and 4k tokens each, or the embedded engine over HTTP and 16."""
    tokens = SHORT_TOKENS if short else LONG_TOKENS
    return Cast(
        run="bench-pipeline",
        model=ModelSettings(path=str(model)),
        # A scripted answer comes in one piece, and progress is said of what streams.
        rollout=RolloutSettings(slots=256, group_size=_GROUP_SIZE, max_new_tokens=tokens, progress_tokens=tokens),
        buffer=BufferSettings(batch_groups=_GROUPS, max_lag=_LAG),
        learner=LearnerSettings(
            trainer="scripted", steps=_STEPS, checkpoint_every=_STEPS, publish_every=_PUBLISH_EVERY, advantage="none"
        ),
        engine=EngineSettings(
            kind="embedded" if short else "scripted", max_running=256, scripted_mean_s=0.0, scripted_tokens=tokens
        ),
        recorder=RecorderSettings(plot=False),
    )


async def bench_pipeline(*, short: bool = False, seconds: float = 10.0, warm_s: float = 3.0) -> dict[str, float]:
    """Measure a steady window of a run.

    Args:
        short: 16 tokens from the embedded engine over HTTP instead of 4k from a scripted one.
        seconds: length of the window, by the server's clock.
        warm_s: seconds between the first packed batch and the window.

    Returns:
        Trajectories per second, and CPU microseconds per trajectory of every process.

    Raises:
        BenchError: an actor fell, or no batch was packed in time.
    """
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        await make_model(model, Cast())
        async with Stage.open(pipeline_cast(model, short=short)) as stage:
            if short:
                store = FileStore(stage.files.weights)
                for number in range(_VERSIONS):
                    store.publish(_Untrained(model), line=0, version=number * _PUBLISH_EVERY)
            await stage.enter_all()
            await stage.enter("prompter")
            return await stage.until(measure_window(stage, seconds, warm_s), _DEADLINE_S + seconds + warm_s)


class _Untrained(ScriptedTrainer):
    """Publishes the model as it was: the learner, whose scripted trainer has none, finds its versions there."""

    def __init__(self, model: Path) -> None:
        super().__init__(0.0)
        self._model = model

    def export(self, directory: Path) -> None:
        """A link, which the store does not prune."""
        directory.parent.mkdir(exist_ok=True)
        directory.symlink_to(self._model)


async def measure_window(stage: Stage, seconds: float, warm_s: float) -> dict[str, float]:
    """Rates, and CPU microseconds per trajectory of every process, in a window that begins after the first batch."""
    first = await stage.follow(BATCHES, BATCH_PACKED, lambda record: True)
    begin = first.time_ns + warm_s * 1e9
    await stage.follow(BATCHES, BATCH_PACKED, lambda record: record.time_ns >= begin)
    before = stage.cpu_s()
    await asyncio.sleep(seconds)
    after = stage.cpu_s()
    batches = [
        (record.time_ns, decode(BatchPacked, record.data)) for record in await stage.read(BATCHES, [BATCH_PACKED])
    ]
    window = [(at, batch) for at, batch in batches if begin <= at <= begin + seconds * 1e9]
    members = [member for _, batch in window[1:] for group in batch.groups for member in group.members]
    span_s = (window[-1][0] - window[0][0]) / 1e9
    figures = {
        "trajectories_per_s": len(members) / span_s,
        "batches_per_s": (len(window) - 1) / span_s,
        "tokens_per_trajectory": sum(member.tokens for member in members) / len(members),
    }
    done = figures["trajectories_per_s"] * seconds
    for name in sorted(after):
        figures[f"{name}_cpu_us_per_trajectory"] = 1e6 * (after[name] - before.get(name, 0.0)) / done
    return figures
