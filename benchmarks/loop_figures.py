"""Figures of a window of a run, from its logs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import unpack
from benchmarks.stage import Stage
from topics.actors import VITALS_TAKEN, Vitals
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.engines import ENGINE_READY
from topics.groups import GROUP_DROPPED
from topics.topic import BATCHES, ENGINES, TRAINING, TRAJECTORIES, VITALS, Stream, Topic
from topics.trajectories import TRAJECTORY_DROPPED, TRAJECTORY_GENERATED, TrajectoryGenerated

_STALL = 2.0  # a step that takes so many times the median has compiled, or waited for memory


class Window(NamedTuple):
    """A part of a run, by the server's clock."""

    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.end_ns - self.begin_ns) / 1e9


class SlotMeter:
    """Follows the slots of all rollout workers and how many of them are taken."""

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}  # newest, by worker
        self._busy: list[tuple[int, float]] = []  # shares, with their times
        self._tokens: dict[
            str, list[tuple[int, float]]
        ] = {}  # that engines sampled so far, by worker, with their times

    @classmethod
    @asynccontextmanager
    async def open(cls, stage: Stage, slots: int) -> AsyncIterator[SlotMeter]:
        """Follow a stage's workers for the length of the block.

        Args:
            stage: the run.
            slots: of a worker that reports no other number.
        """
        meter = cls()

        def on_record(record: Record) -> None:
            vitals = unpack(record, record.data)[1]
            if isinstance(vitals, Vitals) and vitals.role == "rollout":
                of_worker = meter.slots[vitals.actor_id] = int(vitals.values.get("slots", slots))
                meter._busy.append((record.time_ns, min(1.0, vitals.values.get("held", 0.0) / of_worker)))
                sampled = vitals.values.get("tokens", 0.0)
                meter._tokens.setdefault(vitals.actor_id, []).append((record.time_ns, sampled))

        reader = LogReader(stage.bus, VITALS, on_record, subjects=[VITALS_TAKEN.pattern(stage.config.run)])
        await reader.start()
        try:
            yield meter
        finally:
            await reader.close()

    def busy_share(self, window: Window) -> float:
        """Return the share of the slots that were taken in a window."""
        shares = [share for at, share in self._busy if window.begin_ns < at <= window.end_ns]
        return statistics.fmean(shares) if shares else 0.0

    def sampled_per_s(self, window: Window) -> float:
        """Return the tokens per second that workers got in a window, those of cancelled trajectories among them."""
        rate = 0.0
        for counts in self._tokens.values():
            within = [one for one in counts if window.begin_ns <= one[0] <= window.end_ns]
            if len(within) > 1:
                rate += (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0]) * 1e9
        return rate


async def window_figures(stage: Stage, window: Window, meter: SlotMeter, *, mean: int) -> dict[str, float]:
    """Return the figures of a window between two steps.

    Args:
        stage: the run.
        window: the part of it.
        meter: of its slots.
        mean: of the lengths of answers: they are short below a half of it, and long above twice as much.
    """
    trained = await _messages(stage, window, TRAINING, BATCH_TRAINED)
    train_s = [batch.metrics.get("train_s", 0.0) for batch in trained]
    usual_s = statistics.median(train_s)
    ready = await _messages(stage, window, ENGINES, ENGINE_READY)
    busy = meter.busy_share(window)
    tokens_per_s = sum(sum(batch.lags.values()) for batch in trained) / window.seconds
    got = meter.sampled_per_s(window)
    return {
        "trained_tokens_per_s": tokens_per_s,
        "untrained_share": 1 - tokens_per_s / got if got else 0.0,
        **await _waste(stage, window, {batch.step for batch in trained}, mean),
        "step_s": window.seconds / len(trained),
        "slots": float(sum(meter.slots.values())),
        "slots_busy_share": busy,
        "credit_wait_s": (1 - busy) * window.seconds / len(trained),
        "learner_busy_share": sum(train_s) / window.seconds,
        "learner_stall_s": sum(seconds - usual_s for seconds in train_s if seconds > _STALL * usual_s),
        "update_s": sum(one.update_s for one in ready) / max(1, len(ready)),
        "engine_pause_share": sum(one.pause_s for one in ready) / window.seconds,
    }


async def _messages(stage: Stage, window: Window, stream: Stream, topic: Topic[Any]) -> list[Any]:
    records = await stage.read(stream, [topic])
    return [unpack(one, one.data)[1] for one in records if window.begin_ns < one.time_ns <= window.end_ns]


async def _waste(stage: Stage, window: Window, steps: set[int], mean: int) -> dict[str, float]:
    """Return the tokens of the batches of a window that were masked, and the tokens that ended otherwise, as shares."""
    answers: dict[str, TrajectoryGenerated] = {}
    for record in await stage.read(TRAJECTORIES, [TRAJECTORY_GENERATED]):
        answer = unpack(record, record.data)[1]
        if isinstance(answer, TrajectoryGenerated):
            answers[answer.trajectory_id] = answer
    sampled, masked, twice = Counter[str](), Counter[str](), 0
    for record in await stage.read(BATCHES, [BATCH_PACKED]):
        batch: Any = unpack(record, record.data)[1]
        if batch.step not in steps:
            continue
        for member in (member for group in batch.groups for member in group.members):
            if (found := answers.get(member.trajectory_id)) is None:
                continue
            length = "short" if member.tokens < mean / 2 else "long" if member.tokens > 2 * mean else "usual"
            sampled[length] += member.tokens
            masked[length] += sum(one.tokens for one in found.versions if 0 <= one.version < batch.min_version)
            twice += found.discarded
    ends = [
        *await _messages(stage, window, BATCHES, TRAJECTORY_DROPPED),
        *await _messages(stage, window, BATCHES, GROUP_DROPPED),
    ]
    dropped = sum(end.tokens for end in ends)
    total = max(1, sampled.total() + dropped + twice)
    return {
        "sampled_tokens_per_s": total / window.seconds,
        "wasted_share": (masked.total() + dropped + twice) / total,
        "masked_share": masked.total() / total,
        **{f"masked_{name}_share": masked[name] / max(1, sampled[name]) for name in ("short", "usual", "long")},
        "dropped_share": dropped / total,
        "sampled_twice_share": twice / total,
    }
