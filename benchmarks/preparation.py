"""Slots of a rollout worker that are busy while the sandboxes of later rows are prepared."""

from __future__ import annotations

import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import unpack
from asyncrl.config.settings import Config
from asyncrl.training.init_model import create_configured
from benchmarks import prepared_rows
from benchmarks.stage import Stage, bench_config
from topics.actors import VITALS_TAKEN, Vitals
from topics.topic import GRADES, VITALS
from topics.trajectories import TRAJECTORY_GRADED, TrajectoryGraded
from topics.wire import decode

_TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '=' }}{% endfor %}"
_GROUP, _SPARE = 4, 1.25
_DEADLINE_S = 240.0


async def bench_preparation(*, kind: str, setup: float, work: float, slots: int, seconds: float) -> dict[str, float]:
    """Measure a steady window of a run whose rows have a setup that sleeps, before the work and before the tests.

    Args:
        kind: of the sandboxes.
        setup: seconds of the setup.
        work: seconds of the program in the slot.
        slots: of the worker.
        seconds: length of the window.

    Returns:
        The share of the slots that worked, the same without trajectories that are prepared ahead, and counts.

    Raises:
        BenchError: an actor failed, or the time ran out.
    """
    ready = math.ceil(_SPARE * slots * 2 * setup / work)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        create_configured(model, msgspec.convert({"model": {"create": {"template": _TEMPLATE}}}, Config))
        config = _config(model, kind=kind, setup_s=setup, work_s=work, slots=slots, ready=ready)
        async with Stage.open(config) as stage:
            await stage.enter_all()
            await stage.enter("prompter")
            figures = await stage.until(_window(stage, 3 * setup + work, seconds), _DEADLINE_S + 3 * setup + seconds)
    return {**figures, "ready": ready, "slots_busy_share_unprepared": work / (2 * setup + work)}


def _config(model: Path, *, kind: str, setup_s: float, work_s: float, slots: int, ready: int) -> Config:
    batch = math.ceil((slots + ready) / _GROUP)
    return bench_config(
        "bench-preparation",
        model={"path": str(model)},
        task={
            "source": f"{prepared_rows.__file__}:rows",
            "options": {"setup_s": setup_s},
            "rollout": "harness:work",
        },
        reward={"function": ""},
        harnesses={"work": {"kind": "mini", "file": "f", "check": ["sleep", f"{work_s:g}"], "turns": 1}},
        sandbox={"kind": kind, "trusted": True, "ready": ready},
        rollout={"slots": slots, "group_size": _GROUP},
        buffer={"batch_groups": batch, "max_lag": 2, "group_deadline_s": 3600.0},
        learner={"steps": 1_000_000, "checkpoint_every": 1_000_000, "advantage": "none"},
        engine={"kind": "scripted"},
    )


async def _window(stage: Stage, warm_s: float, seconds: float) -> dict[str, float]:
    """Return the figures of a window that begins `warm_s` seconds after the first grade."""
    first = await stage.follow(GRADES, TRAJECTORY_GRADED, lambda _: True)
    begin_ns = first.time_ns + int(warm_s * 1e9)
    vitals: list[tuple[int, dict[str, Any]]] = []

    def on_record(record: Record) -> None:
        message = unpack(record, record.data)[1]
        if isinstance(message, Vitals) and message.role == "rollout" and record.time_ns >= begin_ns:
            vitals.append((record.time_ns, message.values))

    reader = LogReader(stage.bus, VITALS, on_record, subjects=[VITALS_TAKEN.pattern(stage.config.run)])
    await reader.start()
    await stage.follow(VITALS, VITALS_TAKEN, lambda record: record.time_ns >= begin_ns + seconds * 1e9)
    await reader.close()
    (began_ns, before), (ended_ns, after) = vitals[0], vitals[-1]
    span_s = (ended_ns - began_ns) / 1e9
    grades = [
        decode(TrajectoryGraded, record.data)
        for record in await stage.read(GRADES, [TRAJECTORY_GRADED])
        if began_ns < record.time_ns <= ended_ns
    ]
    return {
        "slots_busy_share": (after["slots_taken_s"] - before["slots_taken_s"]) / (span_s * after["slots"]),
        "trajectories": len(grades),
        "mean_reward": statistics.fmean(grade.reward for grade in grades),
        "most_sandboxes": max(values["sandboxes"] for _, values in vitals),
        "window_s": span_s,
    }
