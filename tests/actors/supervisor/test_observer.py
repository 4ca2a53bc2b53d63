"""The state of a run as a topic."""

import asyncio
import json

import msgspec

from actors.supervisor.observer import follow_run, publish_state
from asyncrl.bus.log import Record, read_last
from asyncrl.bus.merged_reader import read_each
from asyncrl.bus.publish import TIME_TO_LIVE, WRITER, publish
from asyncrl.state.live_tap import LiveTap, Pattern
from asyncrl.state.published import read_moments
from asyncrl.state.records import Actor
from asyncrl.state.run_state import RunState
from asyncrl.state.status import run_moment, run_status, shortened
from harness.stage import until
from topics.actors import ActorStarted, Vitals
from topics.batches import BATCH_TRAINED, BatchTrained
from topics.runs import RUN_HISTORY, RUN_STATE
from topics.topic import TRAINING


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


async def test_the_history_is_thinned_with_age(bus, stage):
    context, times = stage().context("supervisor", bus), iter(range(1000, 2000, 10))
    task = asyncio.create_task(publish_state(context, await follow_run(context), lambda: float(next(times))))

    async def found() -> dict[str, list[float]]:
        moments: dict[str, list[float]] = {}
        await read_each(bus, RUN_HISTORY, lambda one, _: moments.setdefault(one.every, []).append(one.at_s))
        return moments

    async def has_three() -> bool:
        return len((await found()).get("1s", [])) >= 3

    await until(has_three, "three moments")
    context.stop.set()
    await task

    moments = await found()
    assert moments["1s"][:3] == moments["10s"][:3] == [1000.0, 1010.0, 1020.0]
    assert moments["60s"] == [1000.0]
    records = [await read_last(bus, RUN_HISTORY, every) for every in ("1s", "10s", "60s")]
    assert [record.headers.get(TIME_TO_LIVE) for record in records] == ["600s", "21600s", None]
    assert [moment.at_s for moment in await read_moments(bus)][:3] == [1000.0, 1010.0, 1020.0]  # each time once


async def test_a_run_without_the_stream_of_an_older_version_has_no_history(connect):
    assert await read_moments(await connect("not-provisioned")) == []


def test_the_metrics_of_a_state_have_the_names_of_the_metrics_file():
    state = RunState("demo")
    state.figures = {"response_tokens_mean": 7.0, "truncated_share": 0.5}
    trained = BatchTrained(1, 0, "rl", {"loss": 0.1}, {0: 10, 1: 30}, 0, [0.5, 0.1], 8, 1)
    state.apply(BATCH_TRAINED, trained, Record(TRAINING, 1, "", {}, b"", 1))

    status = run_status(state, 2)

    main = {"reward/mean": 0.5, "reward/std": 0.1, "lag/mean": 0.75, "response_length/mean": 7.0}
    assert status.metrics == main | {"loss": 0.1, "truncated_share": 0.5}
    assert run_moment(status, "1s").metrics == main


def test_a_moment_of_a_thousand_actors_is_as_large_as_one_of_ten():
    def size(actors: int) -> int:
        state = RunState("demo")
        for number in range(1, actors + 1):
            name = f"rollout-{number}"
            state.actors[name] = Actor(
                name, "rollout", starts=[1], vitals=Vitals("rollout", name, 1, 1.0, {"cpu_share": 0.5})
            )
        moment = run_moment(run_status(state, 2), "1s")
        assert moment.live == {"rollout": actors} and moment.cores == {"rollout": actors / 2}
        return len(json.dumps(msgspec.to_builtins(moment)))

    assert size(1000) <= size(10) + 10


def test_a_shortened_state_lists_actors_of_each_pool_and_counts_all():
    state = RunState("demo")
    for role, count in (("rollout", 1000), ("gateway", 2)):
        for number in range(1, count + 1):
            name = f"{role}-{number}"
            state.actors[name] = Actor(name, role, starts=[1], vitals=Vitals(role, name, 1, 1.0, {"cpu_share": 0.5}))

    status = shortened(run_status(state, 2), 10)

    assert [actor.actor_id for actor in status.actors] == [
        *(f"rollout-{number}" for number in range(1, 9)),
        "gateway-1",
        "gateway-2",
    ]
    assert {name: (pool.live, pool.cores) for name, pool in status.pools.items()} == {
        "rollout": (1000, 500.0),
        "gateway": (2, 1.0),
    }
