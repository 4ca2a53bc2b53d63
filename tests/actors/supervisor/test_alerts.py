"""Alerts: when a condition holds, and that each change is published once."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from actors.runtime.keeper import Keeper
from actors.supervisor.alerts import StepRows, watch_alerts
from actors.supervisor.fold import SupervisorFold
from asyncrl.bus.connection import Bus
from asyncrl.bus.merged_reader import read_each
from asyncrl.config.alert_settings import AlertSettings, parse_condition
from asyncrl.state.alert_rules import AlertRule
from harness.stage import Stage, until
from topics.actors import STOP_REQUESTED
from topics.alerts import ALERT_ENDED, ALERT_RAISED
from topics.topic import FLEET


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
        ("reward/mean missing for 2 steps", (..., 0.1, ..., ...), [("AlertRaised", 4)]),
        ("reward/mean not finite", (0.1, None, 0.1), [("AlertRaised", 2), ("AlertEnded", 3)]),
        ("reward/mean not finite", (..., float("inf")), [("AlertRaised", 2)]),
        ("reward/mean < 0.5", (..., None, float("nan")), []),
    ],
)
def test_an_alert_is_raised_where_its_condition_holds(when: str, values: tuple[Any, ...], expected: list[Any]):
    assert changes(when, *values) == expected


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


async def test_each_change_is_published_once_over_restarts_and_delivered(
    bus: Bus, stage: Callable[..., Stage], posted: tuple[str, list[dict[str, Any]]], tmp_path: Path
):
    url, bodies = posted
    noted = tmp_path / "noted"
    low = {"when": "reward/mean < 0.5", "name": "low", "webhook": url, "command": ["tee", str(noted)]}
    made = stage(alert=[low, {"when": "loss not finite", "do": "stop"}])
    rewards = [0.9, 0.1, 0.9, 0.1]

    async def watched(steps: int, *expected: tuple[str, str, int], **figures: Any) -> None:
        context = made.context("supervisor", bus)
        rows = [row(step, **{"reward/mean": rewards[step - 1]}) for step in range(1, steps + 1)]
        rows[-1] |= figures
        context.files.metrics.write_text("".join(json.dumps(one) + "\n" for one in rows))
        fold = SupervisorFold(context.config)
        keeper = Keeper(context, FLEET, fold)
        await keeper.start()
        task = asyncio.create_task(watch_alerts(context, keeper, fold))

        async def all_are_there() -> bool:
            return await published(bus) == list(expected)

        await until(all_are_there, "the alerts")
        context.stop.set()
        await task
        await keeper.close()

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
