"""The issues of a run compared with its data: which rows they carry, and the seeds that they are sampled with."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from actors.prompter.actor import sampling_seed
from actors.prompter.fold import PrompterFold
from actors.prompter.sources import TASK_ROWS, data_of
from asyncrl.config.held_out import held_out_sets, set_of
from asyncrl.config.settings import Config
from asyncrl.config.tasks import Mixture, Task
from asyncrl.data.curriculum import at_level, level_of
from asyncrl.data.row_maker import RowMaker, RowMakerDown
from asyncrl.data.sources import RowSetup
from asyncrl.environments.protocol import DataError
from asyncrl.run.inputs import changed_data, is_data
from asyncrl.state.audit.group import digest_of
from asyncrl.state.audit.ledger import Ledger
from topics.batches import BatchPacked
from topics.groups import GroupDropped
from topics.ids import EVALUATION, LIVE, TASK, WARMUP, letter_of, number_of, prompt_name, trajectory_name
from topics.prompts import PromptIssued, PromptRow
from topics.wire import Message

_AT_ONCE = 256  # groups whose rows are requested at once


class Carried(NamedTuple):
    """Rows that a message carries: those of a group, by number of its first row."""

    prompt_id: str
    first: int  # of an evaluation: the member
    digest: str
    samples: int = 1  # members of an evaluation that share a row


class DataOrder:
    """Notes the rows of every issue while the logs are read, and compares them with the data once they were."""

    def __init__(self, ledger: Ledger, config: Config, base: Path, *, own_code: bool = True) -> None:
        self._own_code = own_code  # whether to import the functions that the run's user wrote
        self._ledger = ledger
        self._config = config
        self._base = base
        self._prompter, self._mixture = PrompterFold(config), Mixture(config)
        self._further = config.rollout.oversample  # members of each group
        # Three numbers a group: a run has millions.
        self._sets = held_out_sets(config)
        self._numbers: dict[tuple[str, str], array[int]] = {}  # of the prompt, by its data and letter
        self._firsts: dict[tuple[str, str], array[int]] = {}  # of its rows
        self._digests: dict[tuple[str, str], array[int]] = {}
        ledger.groups.on_issue = self._note
        ledger.on_message = self._count

    async def compare(self) -> list[str]:
        """Compare all that was noted; returns why it cannot."""
        self.compare_levels()
        opening, notes = self._ledger.opening, []
        replaced = [path for path in opening.changed_inputs if is_data(path)]
        if replaced := replaced or await asyncio.to_thread(changed_data, opening.digests):
            return [f"rows with the data: {path} is not the file that the run began with" for path in replaced]
        for name, setup in data_of(self._config, self._base).items():
            if setup.functions and not self._own_code:
                named = ", ".join(setup.functions)
                notes.append(f"rows of {named}: code that a run of another user names is not imported here")
            elif unread := await self._compare_with(name, setup):
                notes.append(unread)
        return notes

    async def _compare_with(self, name: str, setup: RowSetup) -> str:
        """Compare the prompts of one of the run's data with the data; returns why it cannot, or ""."""
        try:
            maker = await RowMaker.open(setup)
        except (DataError, RowMakerDown) as error:
            return f"rows with the data: {error}"
        try:
            self._prompter.opened(name, maker.opened.rows_per_epoch)
            self._prompter.record_mastered()
            carried = self.carried(name)
            while some := list(islice(carried, _AT_ONCE)):
                maker.want(dict.fromkeys(place for one in some for place in self.places(one)))
                for one in some:
                    self.check(one, [await maker.row(place) for place in self.places(one)])
        except (DataError, RowMakerDown) as error:
            return f"rows with the data: {error}"
        finally:
            await maker.close()
        return ""

    def compare_levels(self) -> None:
        """Compare the levels that prompts were issued with and those that follow from all batches."""
        key, source = (TASK_ROWS, TASK), self._prompter.sources[TASK]
        for number, first in zip(self._numbers.get(key, ()), self._firsts.get(key, ()), strict=True):
            expected = source.group(self._prompter.state, number).places.start  # a later rise does not change it
            if level_of(first) != level_of(expected):
                found, right = f"level {level_of(first)}", f"{level_of(expected)}, by the answers before it"
                self._ledger.violations.add("wrong level", prompt_name(TASK, number), found, right)

    def carried(self, data: str) -> Iterator[Carried]:
        """Return the notes of what one of the run's data has."""
        samples = {held_out.data: held_out.samples for held_out in self._sets.values()}.get(data, 1)
        for key, numbers in self._numbers.items():
            if key[0] != data:
                continue
            rule, state = self._prompter.mastery if data == TASK_ROWS else None, self._prompter.state
            for number, plain, digest in zip(numbers, self._firsts[key], self._digests[key], strict=True):
                first = rule.place(state.mastered, plain) if rule is not None else plain
                yield Carried(prompt_name(key[1], number), first, f"{digest:016x}", samples)

    def places(self, carried: Carried) -> range:
        """Return the places of its rows in the endless order of the data."""
        count = self._config.warmup.rows_per_trajectory if letter_of(carried.prompt_id) == WARMUP else 1
        first = carried.first // carried.samples
        return range(first, first + count)

    def check(self, carried: Carried, rows: Sequence[PromptRow]) -> None:
        """Compare the rows of a group with those that the data has in its place."""
        if carried.digest != (expected := digest_of(rows)):
            found, expected = f"rows of digest {carried.digest}", f"{expected}, by the order of the data"
            member = carried.first if letter_of(carried.prompt_id) == EVALUATION else 0
            self._ledger.violations.add("wrong row", trajectory_name(carried.prompt_id, member), found, expected)

    def _count(self, message: Message) -> None:
        """Note how the answers to prompts were: the difficulty of later ones follows from it."""
        if isinstance(message, BatchPacked):
            for group in message.new_groups:
                self._prompter.count_answers(group.prompt_id, group.task, group.scores)
        elif isinstance(message, GroupDropped):
            self._prompter.count_answers(message.prompt_id, message.task, message.rewards)

    def _check_rules(self, message: PromptIssued, task: Task) -> None:
        """Compare a group with its task, as the stage has it that holds for its number."""
        found, expected = (
            f"task {name}, groups of {size}, temperature {temperature:g}"
            for name, size, temperature in (
                (message.task, message.group_size, message.temperature),
                (task.name, task.group_size + self._further, task.temperature),
            )
        )
        if found != expected:
            self._ledger.violations.add("wrong rules", message.prompt_id, found, f"{expected}, by its number")

    def _note(self, message: PromptIssued, rows: str) -> None:
        name, attempt = message.trajectory_id, message.attempt
        if message.seed != (seed := sampling_seed(self._config.seed, name, attempt)):
            self._ledger.violations.add("wrong seed", name, f"seed {message.seed}", f"{seed}, by the seed of the run")
        if not rows:
            return
        letter, number, data = letter_of(message.prompt_id), number_of(message.prompt_id), TASK_ROWS
        if letter == LIVE:
            return  # it is a row of no data: the audit compares it with the turn
        if letter == EVALUATION:
            first, data = message.member, set_of(self._sets, message.task).data
        elif letter == WARMUP:
            group = self._prompter.sources[WARMUP].group(self._prompter.state, number)
            first, data = group.places.start, group.data
        else:  # the stages that it follows were read before it
            number_before, begun = number_of(message.origin or message.prompt_id), self._ledger.stages.begun
            self._check_rules(message, self._mixture.task(number_before, begun))
            first = at_level(self._mixture.place(number_before, begun), message.level)
        for column, value in ((self._numbers, number), (self._firsts, first), (self._digests, int(rows, 16))):
            column.setdefault((data, letter), array("Q")).append(value)
