"""Where a run's time goes between messages, read from the server's times of its logs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

from asyncrl.bus.log import Record
from asyncrl.cli.bench.stage import Stage
from topics.batches import BATCH_PACKED, BATCH_TRAINED, BatchPacked, BatchTrained
from topics.prompts import PROMPT_ISSUED
from topics.topic import BATCHES, GRADES, PROMPTS, TRAINING, TRAJECTORIES
from topics.trajectories import TRAJECTORY_GENERATED, TRAJECTORY_GRADED
from topics.wire import decode


class Hops(NamedTuple):
    """Medians, milliseconds."""

    issued_to_generated_ms: float  # beyond the generation itself, from where a slot was free
    generated_to_graded_ms: float
    graded_to_packed_ms: float  # from the last grade, or the last step, that the batch waited for
    packed_to_trained_ms: float  # beyond the step itself, from where the learner was free
    trained_to_issued_ms: float  # from a step to the next prompt


async def hops_of(stage: Stage, duration: Callable[[int], float]) -> Hops:
    """Read the logs of a finished run.

    Args:
        stage: the run, with groups of one trajectory.
        duration: seconds of each prompt's generation, by its number.
    """
    cast = stage.cast
    issued = _times(await stage.read(PROMPTS, [PROMPT_ISSUED], headers_only=True))
    generated = _times(await stage.read(TRAJECTORIES, [TRAJECTORY_GENERATED], headers_only=True))
    graded = _times(await stage.read(GRADES, [TRAJECTORY_GRADED], headers_only=True))
    trained = {
        decode(BatchTrained, record.data).step: record.time_ns for record in await stage.read(TRAINING, [BATCH_TRAINED])
    }
    packed: dict[int, int] = {}
    packing, training = [], []
    for record in await stage.read(BATCHES, [BATCH_PACKED]):
        batch = decode(BatchPacked, record.data)
        packed[batch.step] = record.time_ns
        waited_for = [graded[member.trajectory_id] for group in batch.groups for member in group.members]
        waited_for += [at for step, at in trained.items() if step == batch.step - 1 - cast.ahead]
        packing.append((record.time_ns - max(waited_for)) / 1e6)
    for step, at in trained.items():
        free = max(packed[step], trained.get(step - 1, 0))
        training.append((at - free) / 1e6 - 1000 * cast.learner.scripted_step_s)
    ends = sorted(generated.values())
    rolling = []
    for place, name in enumerate(sorted(generated, key=lambda name: issued[name])):
        slot_free = ends[place - cast.rollout.slots] if place >= cast.rollout.slots else 0
        waited_ms = (generated[name] - max(issued[name], slot_free)) / 1e6
        rolling.append(waited_ms - 1000 * duration(int(name[1:].split("-")[0])))
    grading = [(at - generated[name]) / 1e6 for name, at in graded.items()]
    issuing = [(after - at) / 1e6 for at in trained.values() if (after := _next(issued, at))]
    return Hops(*(statistics.median(values or [0.0]) for values in (rolling, grading, packing, training, issuing)))


def _times(records: list[Record]) -> dict[str, int]:
    return {record.subject.rsplit(".", 1)[1]: record.time_ns for record in records}


def _next(times: dict[str, int], at: int) -> int:
    return min((time for time in times.values() if time > at), default=0)
