"""Weights from a trainer to one engine under load: through the store, and directly.

This process has the learner's part; another process sends the requests. The trainer's ranks, the server and its engine
actor are processes as in a run.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncrl.engine.sglang.control import SGLangControl
from benchmarks.load import Events, Load, Update, context_of, silence, transition
from benchmarks.random_model import SHAPES
from benchmarks.stage import BenchError, report
from benchmarks.updates import Served, Updates

_LOADED_S = {"sglang": 20.0, "embedded": 3.0}  # for the requests to run
_AFTER_S = 2.0  # time to follow requests after an update; up to `_LONGEST_S` while too few requests have continued
_LONGEST_S, _LOOK_S = 5.0, 0.25
_WARM = 1  # versions that are not counted
_FRONT = f"-m {SGLangControl.module}"  # SGLang renames the processes that its front process starts


class Course(NamedTuple):
    """The number of versions, and whether steps run at the same time."""

    rounds: int  # versions that are counted
    idle: bool  # the trainer begins no step before a version has arrived
    answer: int  # tokens of the longest answer


async def bench_direct(
    *,
    ways: list[str],
    updates: list[str],
    deadline_s: float,
    layout: Sequence[tuple[str, int]] = (),
    **options: Any,
) -> dict[str, float]:
    """Measure each way with each kind of update; the deadline of each includes the start of its server.

    Returns:
        Medians; names begin with the way and the kind of update. Times are in seconds.

        - `copy_s`: from the end of a step until the next step may begin.
        - `standstill_s`: delay of the next step.
        - `announced_s`, `ready_s`: from the end of a step to the announcement, and to `engine.ready`.
        - `new_90_s`: from the end of a step until 90 of 100 requests sample with the new version.
        - `fetch_s`: the engine fetches the version.
        - `update_s`: from `engine.updating` to `engine.ready`.
        - `pause_s`: from abort or pause until the server samples again; it contains `hold_s`, until the server has
          stopped, and `load_s`.
        - `again_s`: from `engine.updating` until 95 of 100 requests have a token again.
        - `sent_s`: the same until these requests have been sent again; only for `resume`.
        - `silence_s`: longest time without a token of any request.
        - `request_silence_s`, `request_silence_most_s`: longest time without a token of one request: median, maximum.
        - `in_step_...`, `quiet_...`: these silences during a step without an update, and without a step.
        - `quiet_requests_per_s`, `quiet_front_cores`: without a step, the rate of requests and the cores that SGLang's
          front process uses.
        - `share_direct`: share of the versions that took the direct way.
    """
    figures: dict[str, float] = {}
    course = Course(**{name: options.pop(name) for name in Course._fields})
    for way in ways:
        for update in updates:
            context = max(context_of(course.answer), options["size"][1])
            served = Served(way, update, context=context, layout=dict(layout), **options)
            try:
                async with asyncio.timeout(deadline_s):
                    found = await _measured(served, course)
            except (BenchError, TimeoutError, OSError, RuntimeError) as error:
                report(f"{way}, {update}: FAILED: {type(error).__name__}: {error}")
                found = {"failed": 1.0}
            figures |= {f"{way}_{update}_{name}": value for name, value in found.items()}
    return figures


async def _measured(served: Served, course: Course) -> dict[str, float]:
    async with Updates.opened(served) as updates:
        in_place, vocabulary = served.update == "in_place", SHAPES[served.shape].vocabulary
        report("the requests start")
        asked = {"running": served.running, "in_place": in_place, "vocabulary": vocabulary, "answer": course.answer}
        load = await Load.start(updates.stage, asked)
        await asyncio.sleep(_LOADED_S[served.kind])
        alone_s, before = await _alone(updates, load)
        report(_words("without updates", before))
        notes: dict[str, list[float]] = {}
        ways: list[str] = []
        for number in range(1, course.rounds + _WARM + 1):
            way, found = await _round(updates, load, served, number, None if course.idle else alone_s)
            report(_words(f"version {number} by {way}", found))
            if number > _WARM:
                ways.append(way)
                for name, value in found.items():
                    notes.setdefault(name, []).append(value)
        await load.end()
        await updates.tell_loads()
    medians = {name: statistics.median(values) for name, values in notes.items()}
    direct = {} if not served.direct else {"share_direct": ways.count(served.way) / len(ways)}
    return {**before, **medians, **direct}


async def _alone(updates: Updates, load: Load) -> tuple[float, dict[str, float]]:
    """Return seconds of a step without an update, and the longest times without a token, with and without the step."""
    await load.events()
    began, front_s = time.monotonic(), updates.stage.cpu_s_of(_FRONT)
    await asyncio.sleep(_AFTER_S)
    front_s, events, ended = updates.stage.cpu_s_of(_FRONT) - front_s, await load.events(), time.monotonic()
    quiet = silence(events, began, ended)
    quiet |= {"front_cores": front_s / (ended - began), "requests_per_s": len(events.sent) / (ended - began)}
    await updates.step()
    await load.events()
    began = time.monotonic()
    step_s = min([await updates.step() for _ in range(2)])
    steps = silence(await load.events(), began, time.monotonic())
    named = (("quiet_", quiet), ("in_step_", steps))
    return step_s, {"step_s": step_s} | {head + name: value for head, one in named for name, value in one.items()}


async def _round(
    updates: Updates, load: Load, served: Served, number: int, alone_s: float | None
) -> tuple[str, dict[str, float]]:
    """Make a step and its version, with the next step at the same time unless `idle`; return the way of the version."""
    await updates.step()
    events = await load.events()
    ended = time.monotonic()
    await updates.copy()
    copied = time.monotonic()
    announcing = asyncio.create_task(updates.announce(number))
    beside_s = await updates.step() if alone_s is not None else None
    message = await announcing
    ready = await updates.loaded(message)
    update = Update(number, ended, updates.updating[message.key], updates.ready[message.key][1])
    moved = await _moved(load, events, update, in_place=served.update == "in_place")
    await updates.prune(message)
    found = {
        "copy_s": copied - ended,
        "announced_s": updates.announced[message.key] - ended,
        "ready_s": update.ready - ended,
    }
    if beside_s is not None and alone_s is not None:
        found["standstill_s"] = copied - ended + beside_s - alone_s
    found |= {name: getattr(ready, name) for name in ("fetch_s", "update_s", "pause_s", "hold_s", "load_s")}
    found |= silence(events, update.updating - 0.5, update.ready + _AFTER_S) | moved
    return ready.direct or ("a difference" if ready.delta else "files"), found


async def _moved(load: Load, events: Events, update: Update, *, in_place: bool) -> dict[str, float]:
    """Follow the requests until most of them have continued; append their events."""
    while True:
        await asyncio.sleep(_LOOK_S)
        events.extend(await load.events())
        passed_s, found = time.monotonic() - update.ready, transition(events, update, in_place=in_place)
        if passed_s >= _AFTER_S and (found.keys() >= {"again_s", "new_90_s"} or passed_s >= _LONGEST_S):
            return found


def _words(about: str, figures: dict[str, float]) -> str:
    return f"{about}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
