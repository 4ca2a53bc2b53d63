"""The gap between a real run and the ideal schedule: same prompts, durations and rules, real actors and NATS."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec

from actors.prompter.actor import decide
from actors.prompter.fold import Wanted
from actors.prompter.sources import Group
from asyncrl.config.settings import Config
from asyncrl.config.slots import first_slots
from asyncrl.data.sources import open_source
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.scripted.client import scripted_duration
from asyncrl.rollout.journal import seed_of_call
from asyncrl.training.init_model import create_configured
from benchmarks.simulate import Rules, ideal_schedule, lower_bound_s
from benchmarks.stage import BenchError, Stage, bench_config, report
from topics.batches import BATCH_TRAINED, BatchTrained
from topics.ids import TASK, prompt_name
from topics.prompts import PROMPT_ISSUED, PromptIssued
from topics.topic import PROMPTS, TRAINING
from topics.wire import decode

_PARALLEL = ((10.0, 15), (1.0, 5), (0.0, 1))  # (least mean, concurrent runs): runs with long means use little CPU
_SLOTS, _GROUPS, _SIGMA = 32, 16, 1.2
_FIRST_CALL = "0"  # path of the only generation of a single turn
_OVERTIME = 10.0  # a run that takes this many times the ideal schedule's time has stalled


class Cell(NamedTuple):
    """The settings of one run: mean duration, L and seed."""

    mean_s: float
    lag: int
    seed: int


class Result(NamedTuple):
    """Times of one cell, in seconds."""

    cell: Cell
    real_s: float
    ideal_s: float
    bound_s: float


def parallel_for(mean_s: float) -> int:
    """Return how many runs of this mean do not disturb one another."""
    return next(count for least, count in _PARALLEL if mean_s >= least)


def cell_config(cell: Cell, model: Path, *, steps: int) -> Config:
    """The settings of one run."""
    durations = {"scripted_mean_s": cell.mean_s, "scripted_sigma": _SIGMA}
    return bench_config(
        f"bench-{round(cell.mean_s * 1000)}-{cell.lag}-{cell.seed}",
        seed=cell.seed,
        model={"path": str(model)},
        rollout={"slots": _SLOTS, "group_size": 1},
        buffer={"batch_groups": _GROUPS, "max_lag": cell.lag},
        # Only the last step writes a checkpoint: the benchmark measures the schedule, not the disk.
        learner={
            "steps": steps,
            "advantage": "none",
            "scripted_step_s": cell.mean_s / 2,
            "checkpoint_every": steps,
        },
        engine={"kind": "scripted", "max_running": _SLOTS, "scripted_tokens": 16, **durations},
    )


def rules_of(config: Config) -> Rules:
    """Return the rules of the ideal schedule."""
    return Rules(
        slots=first_slots(config),
        batch_groups=config.buffer.batch_groups,
        max_lag=config.buffer.max_lag,
        ahead=config.ahead,
        steps=config.learner.steps,
        step_s=config.learner.scripted_step_s,
        min_fresh=config.buffer.min_fresh,
        tokens=config.engine.scripted_tokens,
    )


class Script:
    """The prompts of a run by number, and the durations of its scripted engine."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._source = open_source(config.task.source, options=config.task.options, seed=config.seed, base=Path())
        self._durations: dict[int, float] = {}

    @cached_property
    def _tokenizer(self) -> TaskTokenizer:
        return TaskTokenizer.load(Path(self._config.model.path))

    def prompt(self, number: int) -> PromptIssued:
        """Return the prompts that the prompter issues."""
        group = Group(prompt_name(TASK, number), "rl", ["task"], 1, range(number, number + 1))
        return decide(Wanted(group, 0, 0), self._config.seed, [self._source.row(number)])

    def duration(self, number: int) -> float:
        """Return the seconds of its generation."""
        if number not in self._durations:
            issued, engine = self.prompt(number), self._config.engine
            ids = self._tokenizer.encode_prompt(issued.rows[0], max_tokens=None)
            seed = seed_of_call(issued.seed, _FIRST_CALL)
            self._durations[number] = scripted_duration(
                ids, seed, mean_s=engine.scripted_mean_s, sigma=engine.scripted_sigma
            )
        return self._durations[number]

    def check(self, issued: Sequence[PromptIssued]) -> None:
        """Check that a run had these prompts: otherwise its share of the ideal means nothing.

        Raises:
            BenchError: a prompt differs; names the first one.
        """
        for number, found in enumerate(issued):
            expected = self.prompt(number)
            if (found.prompt_id, found.rows, found.seed) != (expected.prompt_id, expected.rows, expected.seed):
                raise BenchError(
                    f"run {self._config.run}: prompt {number} is {found.prompt_id} with seed {found.seed}, but the "
                    f"ideal schedule has {expected.prompt_id} with seed {expected.seed}; the program has changed"
                )


async def bench_schedule(
    *,
    means_s: Sequence[float],
    lags: Sequence[int],
    seeds: Sequence[int],
    steps: int,
    parallel: int = 0,
) -> dict[str, float]:
    """Run every cell and compare it with its ideal schedule.

    Args:
        parallel: concurrent runs; 0 for the default of each mean.

    Returns:
        Medians over all cells of a mean: shares of the ideal and of the bound.

    Raises:
        BenchError: a run failed or stalled.
    """
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        create_configured(model, Config())
        for mean_s in means_s:
            cells = [Cell(mean_s, lag, seed) for lag in lags for seed in seeds]
            together = parallel or parallel_for(mean_s)
            results: list[Result] = []
            for first in range(0, len(cells), together):
                some = await run_together(cells[first : first + together], model, steps=steps)
                for result in some:
                    report(_line(result))
                results += some
            figures |= _figures(mean_s, results, lags)
    return figures


async def run_together(cells: Sequence[Cell], model: Path, *, steps: int) -> list[Result]:
    """Run some cells at once: prompts are issued when the actors of all of them are ready."""
    barrier = asyncio.Barrier(len(cells))
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(run_cell(cell, model, barrier, steps=steps)) for cell in cells]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the other cells were stopped because of it
    return [task.result() for task in running]


async def run_cell(cell: Cell, model: Path, barrier: asyncio.Barrier, *, steps: int) -> Result:
    """Run one cell, from the issue of the first prompt to the last trained step, by the server's clock."""
    config = cell_config(cell, model, steps=steps)
    script, rules = Script(config), rules_of(config)
    ideal = ideal_schedule(script.duration, rules)
    async with Stage.open(config) as stage:
        await stage.enter_all()
        await barrier.wait()
        await stage.enter("prompter")
        last = await stage.until(
            stage.follow(TRAINING, BATCH_TRAINED, lambda record: decode(BatchTrained, record.data).step == steps),
            60 + _OVERTIME * ideal.trained_s[-1],
        )
        issued = await stage.read(PROMPTS, [PROMPT_ISSUED])
        script.check([decode(PromptIssued, record.data) for record in issued])
    real_s = (last.time_ns - issued[0].time_ns) / 1e9
    return Result(cell, real_s, ideal.trained_s[-1], lower_bound_s(script.duration, rules))


def _figures(mean_s: float, results: Sequence[Result], lags: Sequence[int]) -> dict[str, float]:
    name = f"mean_{mean_s * 1000:g}_ms"
    shares = [result.ideal_s / result.real_s for result in results]
    figures = {
        f"{name}_share_of_ideal": statistics.median(shares),
        f"{name}_share_of_ideal_lowest": min(shares),
        f"{name}_share_of_bound": statistics.median(result.bound_s / result.real_s for result in results),
        f"{name}_ideal_share_of_bound": statistics.median(result.bound_s / result.ideal_s for result in results),
    }
    for lag in lags:
        of_lag = [result.ideal_s / result.real_s for result in results if result.cell.lag == lag]
        figures[f"{name}_lag_{lag}_share_of_ideal"] = statistics.median(of_lag)
    return figures


def _line(result: Result) -> str:
    fields = {"mean_s": result.cell.mean_s, "lag": result.cell.lag, "seed": result.cell.seed}
    figures = {"share_of_ideal": result.ideal_s / result.real_s, "share_of_bound": result.bound_s / result.real_s}
    return msgspec.json.encode(fields | {name: round(value, 3) for name, value in figures.items()}).decode()
