"""The learner's memory is offered as the version that lies in it, and as no other."""

import asyncio
from collections.abc import Callable

from actors.learner.weight_handles import Offers
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import publish
from harness.stage import Stage, until
from topics.topic import VITALS
from topics.weights import WEIGHTS_OFFERED, WeightsOffered, WeightsRequested, WeightsReturned
from topics.wire import decode

OLD, NEW = "0:1:a", "0:2:b"


async def test_a_version_that_is_not_or_no_longer_in_memory_is_offered_to_no_engine(
    bus: Bus, stage: Callable[..., Stage]
):
    context = stage(weights={"transport": "ipc", "transport_deadline_s": 60.0}).context("learner", bus)
    offered: dict[str, WeightsOffered] = {}
    asked, packed = asyncio.Event(), asyncio.Event()

    def note(record: Record) -> None:
        offer = decode(WeightsOffered, record.data)
        offered[offer.request] = offer

    async def share() -> list[list[bytes]]:
        asked.set()
        await packed.wait()
        return [[b"tensors"]]

    async def ask(engine: str, key: str, name: str) -> WeightsOffered:
        await publish(bus, WeightsRequested(engine, key, name))
        await until(lambda: name in offered, f"the answer to {name}")
        return offered[name]

    offers = Offers(context, share)
    reader = LogReader(bus, VITALS, note, subjects=[WEIGHTS_OFFERED.pattern(bus.run)])
    await offers.start()
    await reader.start()
    packed.set()
    offers.open(NEW)
    older, newest = await ask("engine-1", OLD, "older"), await ask("engine-2", NEW, "newest")
    withdrawn = asyncio.create_task(offers.withdraw())
    await asyncio.sleep(0)
    late = await ask("engine-3", NEW, "late")
    kept = not withdrawn.done()
    await publish(bus, WeightsReturned("engine-2", NEW))
    await asyncio.wait_for(withdrawn, 60)

    offers.open(NEW)
    asked.clear()
    packed.clear()
    asking = asyncio.create_task(ask("engine-1", NEW, "overtaken"))
    await asyncio.wait_for(asked.wait(), 60)
    withdrawn = asyncio.create_task(offers.withdraw())
    await asyncio.sleep(0)
    packed.set()
    overtaken = await asking
    await asyncio.wait_for(withdrawn, 60)

    assert (older.tensors, older.reason) == ([], f"the learner has {NEW} in memory")
    assert (newest.tensors, newest.reason) == ([[b"tensors"]], "")
    assert (late.tensors, late.reason) == ([], "the learner has no version in memory")
    assert kept, "an engine reads it"
    assert (overtaken.tensors, overtaken.reason) == ([], "the learner continues with the next version")
    await reader.close()
    await offers.close()
