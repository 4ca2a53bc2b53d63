"""The state of a run as a topic."""

import asyncio
import json

from actors.supervisor.observer import follow_run, publish_state
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import WRITER, publish
from asyncrl.state.live_tap import LiveTap, Pattern
from harness.stage import until
from topics.actors import ActorStarted
from topics.batches import BatchTrained
from topics.runs import RUN_STATE


async def test_the_state_is_published_again_and_again_and_only_the_newest_is_kept(bus, stage):
    context = stage().context("supervisor", bus)
    await publish(bus, ActorStarted("rollout", "rollout-1", "here", 7))
    tap = LiveTap(bus, Pattern("run.state"))
    await tap.start()
    task = asyncio.create_task(publish_state(context, await follow_run(context), lambda: 1000.0))

    async def newest() -> dict:
        record = await read_last(bus, RUN_STATE)
        return json.loads(record.data) if record is not None else {}

    async def shows_the_actor() -> bool:
        return [actor["actor_id"] for actor in (await newest()).get("actors", [])] == ["rollout-1"]

    async def shows_the_step() -> bool:
        return (await newest())["step"] == 2

    await until(shows_the_actor, "the actor is in the state")
    for step in (1, 2):
        trained = BatchTrained(step, 0, "rl", {}, {0: 10}, 0, [0.5, 0.1], 8, step)
        await publish(bus, trained, headers={WRITER: "a keeper"})
    await until(shows_the_step, "the step is in the state")

    state = await newest()
    assert (state["v"], state["run"], state["rewards"], state["at_s"]) == (1, bus.run, [0.5, 0.5], 1000.0)
    formatted = tap.take()
    assert len(formatted) > 1 and formatted[0].message.run == bus.run
    context.stop.set()
    await task
    await tap.close()
