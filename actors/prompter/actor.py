"""The prompter: issues prompts as long as there is credit, in the seeded order of the data."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import islice

import xxhash

from actors.prompter.fold import PrompterFold, Wanted
from actors.prompter.sources import TASK_ROWS, WARMUP_ROWS, data_of
from actors.runtime.actor import ActorFault, Context
from actors.runtime.keeper import Keeper
from asyncrl.config.held_out import held_out_sets
from asyncrl.data.row_maker import RowMaker
from asyncrl.environments.protocol import DataError
from asyncrl.own_code import read_inputs
from asyncrl.run.inputs import changed_data
from topics.actors import Activity
from topics.ids import trajectory_name
from topics.prompts import PromptIssued, PromptRow
from topics.topic import PROMPTS
from topics.wire import Message

_AT_ONCE = 512  # decisions of one append
_ROWS_AHEAD = 512  # made before they are wanted; requested again once half of them are issued


async def main(context: Context) -> None:
    """Run the prompter until the run ends."""
    config, inputs = context.config, read_inputs(context.files.root)
    if inputs is not None and (changed := await asyncio.to_thread(changed_data, inputs.digests)):
        raise ActorFault(
            f"data {changed[0]} is not the file that the run began with; put that file back and resume the run, or "
            "resume it with --accept-data"
        )
    fold = PrompterFold(config)
    keeper = Keeper(context, PROMPTS, fold)
    opened = asyncio.Event()

    async def data_open() -> None:
        context.doing(Activity("opening data"))
        await opened.wait()

    starting = asyncio.create_task(keeper.start(data_open))  # the logs are folded while the data is opened
    async with AsyncExitStack() as stack:
        rows: dict[str, RowMaker] = {}
        for name, setup in data_of(config, context.files.base).items():
            setup.model = str(context.files.model_path(config.model))
            rows[name] = await RowMaker.open(setup, on_rows=keeper.wake)
            stack.push_async_callback(rows[name].close)
            fold.opened(name, rows[name].opened.rows_per_epoch)
        opened.set()
        await starting
        await keeper.run(Prompter(context, fold, rows).decide)


class Prompter:
    """Issues prompts as far as there is credit, and evaluations in addition, as soon as their rows are made."""

    def __init__(self, context: Context, fold: PrompterFold, rows: dict[str, RowMaker]) -> None:
        self._context = context
        self._fold = fold
        self._rows = rows  # by data
        for held_out in held_out_sets(context.config).values():  # it is issued at once, while its version is the newest
            rows[held_out.data].want(range(held_out.prompts))
        self._training = [name for name in (TASK_ROWS, WARMUP_ROWS) if name in rows]
        self._ahead = 0  # rows of training that were asked for and not issued since
        self._evaluation = ""  # whose rows are being made
        self._waits_for: int | None = None  # a row

    def decide(self) -> Sequence[Message]:
        """Return the stage that begins now, or the prompts that are issued now: these follow it once it is recorded.

        Raises:
            DataError: a row that is needed now cannot be made.
        """
        fold, vitals = self._fold, self._context.vitals
        if fold.mastery is not None:
            vitals["mastered_rows"] = fold.record_mastered()
        if began := fold.stage_begins():
            return began
        wanted = fold.wanted()
        vitals["open_groups"] = fold.open_groups
        vitals["no_more_prompts"] = float(fold.at_end)
        decisions = self._decide(wanted[:_AT_ONCE])
        awaited = self._rows[wanted[0].group.data].making if wanted and not decisions else None
        self._report_activity(awaited)
        # Neither waits for the rows of the other.
        return decisions + self._decide_evaluation(list(islice(fold.wanted_evaluations(), _AT_ONCE)))

    def _decide(self, wanted: list[Wanted]) -> list[PromptIssued]:
        """Issue the first of the wanted members, up to the first row that is not made yet.

        Raises:
            DataError: the very first needs a row that cannot be made.
        """
        self._make_rows(wanted)
        decisions: list[PromptIssued] = []
        for item in wanted:
            try:
                made = self._rows[item.group.data]
                rows = [row for place in item.places if (row := made.get(place)) is not None]
                rows += item.group.given if not item.member else ()
            except DataError:
                if not decisions:
                    raise
                break  # what precedes it is issued first
            if len(rows) < len(item.places):
                break
            decisions.append(decide(item, self._context.config.seed, rows))
            self._ahead -= len(item.places)
        return decisions

    def _make_rows(self, wanted: list[Wanted]) -> None:
        """Request the rows of the wanted members and of those that follow, if too few rows are being made."""
        known = all(place in self._rows[item.group.data] for item in wanted for place in item.places)
        if not wanted or (known and self._ahead >= _ROWS_AHEAD // 2):
            return
        coming = ((item.group.data, place) for item in self._fold.coming() for place in item.places)
        soon = list(islice(coming, max(_ROWS_AHEAD, *(len(item.places) for item in wanted))))
        for name in self._training:
            self._rows[name].want(place for data, place in soon if data == name)
        self._ahead = len(soon)

    def _decide_evaluation(self, wanted: list[Wanted]) -> list[PromptIssued]:
        """Issue members of an evaluation once all its rows are made: its deadline counts from their issue.

        Raises:
            DataError: a row cannot be made.
        """
        if not wanted:
            return []
        group = wanted[0].group
        rows = self._rows[group.data]
        if self._evaluation != group.prompt_id:
            self._evaluation = group.prompt_id
            rows.want(group.places)
        if rows.get(group.places[-1]) is None:
            return []
        of_group = [(item, rows.get(item.places[0])) for item in wanted if item.group is group]
        return [decide(item, self._context.config.seed, [row]) for item, row in of_group if row is not None]

    def _report_activity(self, row: int | None) -> None:
        """Let the vital signs show the row that everything waits for, and for how long."""
        if row != self._waits_for:
            self._waits_for = row
            self._context.doing(Activity() if row is None else Activity("making row", row))


def decide(wanted: Wanted, seed: int, rows: list[PromptRow]) -> PromptIssued:
    """The message that issues one trajectory: a pure function of its number, the seed and its rows."""
    name = trajectory_name(wanted.prompt_id, wanted.member)
    return PromptIssued(
        prompt_id=wanted.prompt_id,
        member=wanted.member,
        group_size=wanted.group.size,
        rows=rows,
        stage=wanted.group.stage,
        attempt=wanted.attempt,
        min_version=wanted.min_version,
        seed=sampling_seed(seed, name, wanted.attempt),
        origin=wanted.group.origin,
        task=wanted.task,
        temperature=wanted.group.temperature,
        estimator=wanted.group.estimator,
        level=wanted.group.level,
        secrets=wanted.group.secrets,
        wanted=wanted.group.wanted,
    )


def sampling_seed(seed: int, trajectory_id: str, attempt: int) -> int:
    """Return the sampling seed of an attempt at a trajectory, from the seed of the run."""
    return xxhash.xxh3_64_intdigest(f"{seed}:{trajectory_id}:{attempt}".encode()) >> 1
