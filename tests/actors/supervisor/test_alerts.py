"""Alerts: when a condition holds, and that each change is published once."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from actors.runtime.keeper import Keeper
from actors.supervisor import alerts as alerts_module
from actors.supervisor.alerts import Alerts, StepRows
from actors.supervisor.fold import SupervisorFold
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.merged_reader import read_each
from asyncrl.bus.publish import WRITER, publish
from asyncrl.config.alert_settings import SHIPPED, AlertSettings, parse_condition
from asyncrl.config.settings import Config
from asyncrl.state.alert_rules import AlertRule
from asyncrl.state.run_state import RunState
from asyncrl.state.watch import Watch
from harness.stage import Stage, until
from topics.actors import STOP_REQUESTED
from topics.alerts import ALERT_ENDED, ALERT_RAISED, AlertRaised
from topics.stalls import StallFound
from topics.topic import FLEET
from topics.weights import CheckpointSaved


def row(step: int, **figures: Any) -> dict[str, Any]:
    return {"event": "step", "step": step, "stage": "rl", **figures}


def changes(when: str, *values: Any, metric: str = "reward/mean") -> list[tuple[str, int]]:
    """Return what changes, and at which step; a value of ... is a row without the metric."""
    rule, found = AlertRule(AlertSettings(when=when)), []
    for step, value in enumerate(values, 1):
        if (change := rule.step(row(step, **({} if value is ... else {metric: value})))) is not None:
            found.append((type(change).__name__, change.step))
    return found


@pytest.mark.parametrize(
    ("when", "values", "expected"),
    [
        ("reward/mean < 0.5", (0.6, 0.4, 0.3, 0.5), [("AlertRaised", 2), ("AlertEnded", 4)]),
        ("reward_mean < 0.5", (0.4,), [("AlertRaised", 1)]),
        ("reward/mean < 0.5 for 2 steps", (0.4, 0.6, 0.4, 0.4), [("AlertRaised", 4)]),
        ("reward/mean >= 1e-1 for 1 step", (0.05, 0.1), [("AlertRaised", 2)]),
        ("median(reward/mean, 3) < 0.5", (0.1, 0.1, 0.9, 0.9), [("AlertRaised", 3), ("AlertEnded", 4)]),
        ("rate(reward/mean, 2) > 0.1", (0.0, 0.1, 0.3, 0.4), [("AlertRaised", 3)]),
        ("ratio(reward/mean, 2) < 0.5", (0.8, 0.8, 0.5, 0.1, 0.8), [("AlertRaised", 4), ("AlertEnded", 5)]),
        ("ratio(reward/mean, 2) < 0.5", (0.0, 0.0, 0.0), []),
        ("reward/mean < 0.5", (0.4, 0.6, 0.4, 0.6), [(f"Alert{('Raised', 'Ended')[i % 2]}", i + 1) for i in range(4)]),
        ("reward/mean missing for 2 steps", (..., 0.1, ..., ...), [("AlertRaised", 4)]),
        ("reward/mean not finite", (0.1, None, 0.1), [("AlertRaised", 2), ("AlertEnded", 3)]),
        ("reward/mean not finite", (..., float("inf")), [("AlertRaised", 2)]),
        ("reward/mean < 0.5", (..., None, float("nan")), []),
    ],
)
def test_an_alert_is_raised_where_its_condition_holds(when: str, values: tuple[Any, ...], expected: list[Any]):
    assert changes(when, *values) == expected


def test_after_a_rollback_an_alert_is_judged_by_the_steps_of_the_new_lineage():
    rule = AlertRule(AlertSettings(when="reward/mean < 0.5 for 2 steps", do="rollback"))

    found = [
        (type(change).__name__, change.step)
        for step, lineage in ((1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1), (7, 2))
        if (change := rule.step(row(step, lineage=lineage, **{"reward/mean": 0.1}))) is not None
    ]

    assert found == [("AlertRaised", 2), ("AlertEnded", 4), ("AlertRaised", 5), ("AlertEnded", 7)]


def test_a_metric_without_a_group_is_one_of_the_training():
    assert changes("loss > 1", 2.0, metric="loss") == changes("train/loss > 1", 2.0, metric="loss") != []


@pytest.mark.parametrize("text", ["reward/mean", "reward/mean = 1", "rate(x, 2) missing", "median(x, 0) < 1", "x < y"])
def test_another_text_is_no_condition(text: str):
    with pytest.raises(ValueError, match="is no condition: expected METRIC < NUMBER"):
        parse_condition(text)


def test_rows_that_a_recorder_writes_again_are_read_once(tmp_path: Path):
    path, lines = tmp_path / "metrics.jsonl", [json.dumps(row(step)) + "\n" for step in range(1, 5)]
    rows = StepRows(path)
    assert list(rows.new()) == []

    path.write_text("".join(lines[:3]))
    assert [one["step"] for one in rows.new()] == [1, 2, 3]
    path.write_text(json.dumps({"event": "eval", "version": 100_000}) + "\n" + "".join(lines) + "{")
    assert [one["step"] for one in [*rows.new(), *rows.new()]] == [4]
    path.write_text(lines[0])
    assert list(rows.new()) == []


@pytest.fixture
async def posted():
    """A webhook: its address, and the bodies that it got."""
    bodies: list[dict[str, Any]] = []

    async def take(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.Response()

    app = web.Application()
    app.router.add_post("/", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield f"http://127.0.0.1:{port}/", bodies
    await runner.cleanup()


async def published(bus: Bus) -> list[tuple[str, str, int]]:
    found: list[tuple[str, str, int]] = []
    for topic in (ALERT_RAISED, ALERT_ENDED):
        await read_each(bus, topic, lambda one, _: found.append((type(one).__name__, one.alert, one.step)))
    return sorted(found, key=lambda one: one[2])


@contextlib.asynccontextmanager
async def watching(made: Stage, bus: Bus, rows: list[dict[str, Any]]) -> AsyncIterator[RunState]:
    """Watch the alerts of a run whose steps have these rows."""
    context, state = made.context("supervisor", bus), RunState(bus.run)
    context.files.metrics.write_text("".join(json.dumps(one) + "\n" for one in rows))
    fold = SupervisorFold(context.config)
    keeper = Keeper(context, FLEET, fold)
    await keeper.start()
    task = asyncio.create_task(Alerts(context, keeper, fold, Watch(bus, state)).watch())
    try:
        yield state
    finally:
        context.stop.set()
        await task
        await keeper.close()


async def are_published(bus: Bus, *expected: tuple[str, str, int]) -> bool:
    return await published(bus) == list(expected)


async def test_each_change_is_published_once_over_restarts_and_delivered(
    bus: Bus, stage: Callable[..., Stage], posted: tuple[str, list[dict[str, Any]]], tmp_path: Path
):
    url, bodies = posted
    noted = tmp_path / "noted"
    low = {"when": "reward/mean < 0.5", "name": "low", "webhook": url, "command": ["tee", str(noted)]}
    made = stage(alert=[low, {"when": "loss not finite", "do": "stop"}])
    rewards = [0.9, 0.1, 0.9, 0.1]

    async def watched(steps: int, *expected: tuple[str, str, int], **figures: Any) -> None:
        rows = [row(step, **{"reward/mean": rewards[step - 1]}) for step in range(1, steps + 1)]
        rows[-1] |= figures
        async with watching(made, bus, rows):
            await until(lambda: are_published(bus, *expected), "the alerts")

    raised, ended = ("AlertRaised", "low", 2), ("AlertEnded", "low", 3)
    await watched(2, raised)
    await watched(3, raised, ended)  # another supervisor, which reads all rows again
    await watched(4, raised, ended, ("AlertRaised", "low", 4), ("AlertRaised", "loss not finite", 4), loss=None)

    await until(lambda: len(bodies) == 3, "three posts")
    told = [(body["topic"], body["step"]) for body in bodies]
    assert told == [("alert.raised", 2), ("alert.ended", 3), ("alert.raised", 4)]
    assert bodies[0]["value"] == 0.1 and bodies[0]["run"] == bus.run
    await until(lambda: noted.exists() and json.loads(noted.read_text() or "{}").get("step") == 4, "the command")
    reasons: list[str] = []
    await read_each(bus, STOP_REQUESTED, lambda one, _: reasons.append(one.reason))
    assert reasons == ["alert loss not finite was raised at step 4"]


async def reasons_to_stop(bus: Bus) -> list[str]:
    reasons: list[str] = []
    await read_each(bus, STOP_REQUESTED, lambda one, _: reasons.append(one.reason))
    return reasons


async def test_after_two_rollbacks_that_change_nothing_the_run_stops(bus: Bus, stage: Callable[..., Stage]):
    low = {"when": "reward/mean < 0.5 for 2 steps", "name": "low", "do": "rollback"}
    for step in (2, 4, 6):
        saved = CheckpointSaved(0, step, "0", f"/there/step{step:06d}-lineage0-00", step)
        await publish(bus, saved, headers={WRITER: "learner"})
    rows = [row(step, lineage=0, **{"reward/mean": 0.9}) for step in range(1, 5)]
    steps = ((5, 0), (6, 0), (7, 1), (8, 1), (9, 2), (10, 2))
    rows += [row(step, lineage=lineage, **{"reward/mean": 0.1}) for step, lineage in steps]

    async with watching(stage(alert=[low], learner={"keep_checkpoints": 3}), bus, rows):
        await until(lambda: reasons_to_stop(bus), "a request to stop")

    found: list[AlertRaised] = []
    await read_each(bus, ALERT_RAISED, lambda one, _: found.append(one))
    # Step 4 is the newest checkpoint from before step 5; nothing was saved since, so step 6 is newest later on.
    assert [(one.do, one.step, one.checkpoint) for one in found] == [
        ("rollback", 6, 4),
        ("rollback", 8, 6),
        ("stop", 10, None),
    ]
    words = "alert low was raised at step 10; it asks for a rollback, and all 2 were made"
    assert await reasons_to_stop(bus) == [words]


async def test_without_a_checkpoint_to_go_back_to_the_run_stops(bus: Bus, stage: Callable[..., Stage]):
    made = stage(alert=[{"when": "reward/mean < 0.5", "name": "low", "do": "rollback"}])

    async with watching(made, bus, [row(1, **{"reward/mean": 0.1})]):
        await until(lambda: reasons_to_stop(bus), "a request to stop")

    words = "alert low was raised at step 1; it asks for a rollback, and no checkpoint is from before that"
    assert await reasons_to_stop(bus) == [words]


async def test_an_alert_is_published_within_two_seconds_of_its_row(bus: Bus, stage: Callable[..., Stage]):
    made = stage(alert=[{"when": "reward/mean < 0.5", "name": "low"}])

    async with watching(made, bus, [row(1, **{"reward/mean": 0.9})]):
        await asyncio.sleep(1.0)  # it looks again and again
        with made.files.metrics.open("a") as file:
            file.write(json.dumps(row(2, **{"reward/mean": 0.1})) + "\n")
        written_ns = time.time_ns()
        await until(lambda: are_published(bus, ("AlertRaised", "low", 2)), "the alert")

    record = await read_last(bus, ALERT_RAISED)
    assert record is not None
    assert (record.time_ns - written_ns) / 1e9 < 2.0


async def test_shipped_rules_notify_unless_they_are_switched_off(
    bus: Bus, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(alerts_module, "_STALLED_S", 0.0)
    flat = [row(step, flat_groups_share=1.0, ess=0.1) for step in range(1, 21)]

    async with watching(stage(shipped_alerts=["no-spread", "stall"]), bus, flat) as state:
        stall = StallFound("engine dead", "engine-1", "no answer", "read its log")
        state.stalls["engine dead", "engine-1"] = stall
        await until(lambda: are_published(bus, ("AlertRaised", "stall", 0), ("AlertRaised", "no-spread", 20)), "both")
        state.stalls.clear()
        expected = ("AlertRaised", "stall", 0), ("AlertEnded", "stall", 0), ("AlertRaised", "no-spread", 20)
        await until(lambda: are_published(bus, *expected), "the end of the stall")

    assert Config().shipped_alerts == [*SHIPPED, "stall"]
    assert all(parse_condition(when) for when in SHIPPED.values())
