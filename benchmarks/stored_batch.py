"""A batch of random tokens in the logs of a run, for steps of the learner's ranks."""

from __future__ import annotations

import numpy as np
import xxhash

from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import WRITER, publish
from topics.batches import BatchGroup, BatchMember, BatchPacked, Objective
from topics.ids import TASK, prompt_name, trajectory_name
from topics.prompts import PromptRow
from topics.trajectories import Reference, Segment, TrajectoryGenerated, count_versions
from topics.wire import encode


async def store_batch(bus: Bus, *, rows: int, tokens: int, vocabulary: int, lr: float) -> int:
    """Store trajectories of one group and the batch that names them; return its sequence.

    Args:
        rows: number of trajectories; every second one has a reward.
        tokens: tokens of each; all but the first are trained on.
        lr: learning rate of its step.
    """
    prompt_id, members = prompt_name(TASK, 1), []
    mask = np.ones(tokens, np.uint8)
    mask[0] = 0
    for number in range(rows):
        drawn = np.random.default_rng(number).integers(3, vocabulary, tokens).astype(np.int32)
        logprobs, versions = np.where(mask, -2.0, 0.0).astype(np.float32), np.where(mask, 0, -1).astype(np.int32)
        segment = Segment(drawn, mask, logprobs, versions)
        message = TrajectoryGenerated(
            trajectory_id=trajectory_name(prompt_id, number),
            prompt_id=prompt_id,
            member=number,
            group_size=rows,
            stage="rl",
            rows=[PromptRow("x")],
            segments=[segment],
            completion="y",
            versions=count_versions([segment]),
        )
        body, sequence = encode(message), await publish(bus, message)
        reference = Reference(sequence, xxhash.xxh3_64_hexdigest(body), len(body))
        members.append(BatchMember(message.trajectory_id, 0, reference, float(number % 2), tokens - 1))
    packed = BatchPacked(1, "rl", [BatchGroup(prompt_id, members)], 0, Objective(learning_rate=lr))
    return await publish(bus, packed, headers={WRITER: "bench"})
