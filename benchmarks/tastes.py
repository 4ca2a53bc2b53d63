"""Turns and seconds until the users of the live demo are satisfied, by learning method and seed."""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.examples.live_users import GOAL, Story
from benchmarks.stage import BenchError, start_asyncrl

_YEAR_S = 3.2e7
_SHOWN = 2000  # characters of a run's output in an error


class Series(NamedTuple):
    """Settings of all runs of a measurement."""

    tastes: int  # of the users, 1 or 2
    steps: int  # of a run, at most
    limit_s: float  # seconds after which a run is asked to stop; 0 for none
    set: Sequence[str] = ()  # further settings, `KEY=VALUE`


async def bench_tastes(*, methods: Sequence[str], seeds: Sequence[int], jobs: int, **options: Any) -> dict[str, float]:
    """Run the live demo once for each method and seed; print a line whenever a run has ended.

    Args:
        methods: values of `live.method`.
        jobs: number of concurrent runs; each uses about two cores.
        options: the fields of `Series`.

    Returns:
        By method: `reached`, the number of runs that reached a satisfaction of 0.9. Medians and maxima over these runs
        of `turns` and `seconds` until then. `before` and `after` (means), and `failed` requests (sum).

    Raises:
        BenchError: a run failed; raised once all others have ended.
    """
    series, places = Series(**options), asyncio.Semaphore(jobs)

    async def one(method: str, seed: int) -> Story:
        async with places:
            return await _run(series, method, seed)

    runs = [(method, seed) for seed in seeds for method in methods]  # runs of a seed are adjacent
    results = await asyncio.gather(*(one(*run) for run in runs), return_exceptions=True)
    figures: dict[str, float] = {}
    for method in methods:
        found = [result for run, result in zip(runs, results, strict=True) if run[0] == method]
        stories = [story for story in found if isinstance(story, Story)]
        figures |= {f"{method}_{name}": value for name, value in _summary(stories).items()} if stories else {}
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return figures


def _summary(stories: Sequence[Story]) -> dict[str, float]:
    reached = [(story, end) for story in stories if (end := story.reached())]
    turns, seconds = [float(end) for _, end in reached], [story.seconds[end - 1] for story, end in reached]
    found = {"reached": float(len(reached)), "runs": float(len(stories))}
    for name, values in (("turns", turns), ("seconds", seconds)):
        if values:
            found |= {f"{name}_median": statistics.median(values), f"{name}_max": max(values)}
    found["before"] = statistics.fmean(story.satisfaction(100) for story in stories)
    found["after"] = statistics.fmean(story.satisfaction(len(story.pleased)) for story in stories)
    return found | {"failed": float(sum(len(story.failures) for story in stories))}


async def _run(series: Series, method: str, seed: int) -> Story:
    settings = {
        "seed": seed,
        "gateway.port": 0,
        "live.method": method,
        "task.options.tastes": series.tastes,
        "learner.steps": series.steps,
    }
    given = [*(f"{key}={value}" for key, value in settings.items()), *series.set]
    words = [word for one in given for word in ("--set", one)]
    with tempfile.TemporaryDirectory(prefix="asyncrl-tastes-", ignore_cleanup_errors=True) as folder:
        process = await start_asyncrl(folder, "up", "live-demo", *words)
        ending = asyncio.get_running_loop().call_later(series.limit_s or _YEAR_S, process.terminate)
        output = (await process.communicate())[0].decode(errors="replace")
        ending.cancel()
        if process.returncode:
            raise BenchError(f"live-demo, {method}, seed {seed}, ended with {process.returncode}: {output[-_SHOWN:]}")
        story = Story(**json.loads((Path(folder) / "runs/live-demo/satisfaction.json").read_text()))
    reached = story.reached()
    when = f"{reached} turns, {story.seconds[reached - 1]:.0f} s" if reached else "never"
    last = f"{len(story.pleased)} turns, {story.seconds[-1]:.0f} s" if story.pleased else "no turn"
    requests = story.rows()["users"].split(", the first")[0]
    print(f"{method}  seed {seed}  {GOAL} after {when}  of {last}; {requests}", flush=True)
    return story
