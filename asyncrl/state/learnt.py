"""The versions of weights that learnt from data that is purged, as the logs that are kept for the whole run have it."""

from __future__ import annotations

from typing import Any, NamedTuple

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import Record
from asyncrl.bus.merged import Part, read_merged
from asyncrl.live.owners import covers
from topics.batches import BATCH_PACKED, BATCH_TRAINED, BatchPacked, BatchTrained
from topics.prompts import PROMPT_ISSUED
from topics.topic import BATCHES, PROMPTS, TRAINING, Topic


class Learnt(NamedTuple):
    """The training that some data had."""

    trajectories: int  # that were trained
    steps: list[int]  # that trained them; step s makes version s


async def learnt_from(bus: Bus, owner: str, before: str) -> Learnt:
    """Look up what was trained of the turns of an owner, of days before another, whether they can be read or not.

    Raises:
        BusGone: the server sends nothing more.
    """
    of_owner: set[str] = set()  # prompts
    packed: dict[int, int] = {}  # trajectories by step
    trained: set[int] = set()

    def take(topic: Topic[Any], message: Any, record: Record) -> None:
        if topic is PROMPT_ISSUED:
            secrets = record.headers.get("secrets", "")
            if secrets and any(covers(secret, owner, before) for secret in secrets.split(",")):
                of_owner.add(record.headers["trajectory"].rsplit("-", 1)[0])
        elif isinstance(message, BatchPacked):
            packed[message.step] = sum(group.prompt_id in of_owner for group in message.groups)
        elif isinstance(message, BatchTrained) and not message.skipped:
            trained.add(message.step)

    run = bus.run
    parts = [
        Part(PROMPTS, subjects=[PROMPT_ISSUED.pattern(run)], headers_only=True),
        Part(BATCHES, subjects=[BATCH_PACKED.pattern(run)]),
        Part(TRAINING, subjects=[BATCH_TRAINED.pattern(run)]),
    ]
    for part in parts:  # one after the other: an issue comes before its batch
        await read_merged(bus, [part], take, lambda _record, _error: None)
    steps = sorted(step for step, count in packed.items() if count and step in trained)
    return Learnt(sum(packed[step] for step in steps), steps)
