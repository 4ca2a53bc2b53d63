"""Results of rollout workers, made by hand, and what is read back from the logs."""

import asyncio
from collections import Counter

import msgspec

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record, read_last
from harness.stage import DEADLINE_S
from topics.actors import DeadLetter
from topics.prompts import PromptRow
from topics.table import QUEUES
from topics.topic import DEAD, Stream
from topics.trajectories import (
    TrajectoryGenerated,
)


async def dead_letters(bus: Bus) -> list[DeadLetter]:
    records: list[Record] = []
    reader = LogReader(bus, DEAD, records.append)
    await reader.start()
    await asyncio.wait_for(reader.caught_up.wait(), DEADLINE_S)
    await reader.close()
    return [msgspec.msgpack.decode(record.data, type=DeadLetter) for record in records]


def generated(number: int) -> TrajectoryGenerated:
    return TrajectoryGenerated(
        trajectory_id=f"p{number:06d}-0",
        prompt_id=f"p{number:06d}",
        member=0,
        group_size=1,
        stage="rl",
        rows=[PromptRow("^ab=", "ba")],
        segments=[],
        completion="ba" if number % 2 else "ab",
        versions=[],
    )


async def is_done(bus: Bus, name: str) -> bool:
    """Return whether all work of a queue was delivered and acknowledged.

    The count of what waits may be older than the last message that was stored, so that message's sequence is compared.
    """
    queue = QUEUES[name]
    newest = await read_last(bus, queue)
    info = await bus.api(f"CONSUMER.INFO.{queue.stream.full_name(bus.run)}.{name}")
    delivered_all = newest is None or info["delivered"]["stream_seq"] >= newest.sequence
    return delivered_all and (info["num_pending"], info["num_ack_pending"]) == (0, 0)


async def counts(bus: Bus, stream: Stream) -> Counter[str]:
    """Messages by topic."""
    records: list[Record] = []
    reader = LogReader(bus, stream, records.append, headers_only=True)
    await reader.start()
    await asyncio.wait_for(reader.caught_up.wait(), DEADLINE_S)
    await reader.close()
    return Counter(".".join(record.subject.split(".")[2:4]) for record in records)
