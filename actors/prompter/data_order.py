"""The issues of a run compared with its data: which rows they carry, and the seeds that they are sampled with."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from actors.prompter.actor import sampling_seed
from actors.prompter.fold import PrompterFold
from actors.prompter.sources import HELD_OUT_ROWS, data_of, place_again
from asyncrl.config.settings import Config
from asyncrl.data.protocol import DataError
from asyncrl.data.row_maker import RowMaker, RowMakerDown
from asyncrl.data.sources import RowSetup
from asyncrl.state.audit.groups import digest_of
from asyncrl.state.audit.ledger import Ledger
from topics.ids import EVALUATION
from topics.prompts import PromptIssued, PromptRow

_AT_ONCE = 256  # groups whose rows are requested at once


class Carried(NamedTuple):
    """Rows that a message carries: those of a group, by number of its first row."""

    prompt_id: str
    first: int
    digest: str


class DataOrder:
    """Notes the rows of every issue while the logs are read, and compares them with the data once they were."""

    def __init__(self, ledger: Ledger, config: Config, base: Path) -> None:
        """
        Args:
            config: of the run.
            base: folder that the paths of the config are relative to.
        """
        self._ledger = ledger
        self._config = config
        self._base = base
        self._prompter = PrompterFold(config)
        # Three numbers a group: a run has millions.
        self._numbers: dict[str, array[int]] = {}  # of the prompt, by letter
        self._firsts: dict[str, array[int]] = {}  # of its rows
        self._digests: dict[str, array[int]] = {}
        ledger.groups.on_issue = self._note

    async def compare(self) -> list[str]:
        """Compare all that was noted; returns why it cannot."""
        for name, setup in data_of(self._config, self._base).items():
            if unread := await self._compare_with(name, setup):
                return [unread]
        return []

    async def _compare_with(self, name: str, setup: RowSetup) -> str:
        """Compare what is of one of the run's data; returns why it cannot, or ""."""
        try:
            maker = await RowMaker.open(setup, limit_s=self._config.task.row_limit_s)
        except (DataError, RowMakerDown) as error:
            return f"rows with the data: {error}"
        try:
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

    def carried(self, data: str) -> Iterator[Carried]:
        """Return the notes of what one of the run's data has."""
        for letter, numbers in self._numbers.items():
            if (letter == EVALUATION) != (data == HELD_OUT_ROWS):
                continue
            for number, first, digest in zip(numbers, self._firsts[letter], self._digests[letter], strict=True):
                yield Carried(f"{letter}{number:06d}", first, f"{digest:016x}")

    def places(self, carried: Carried) -> range:
        """Return the places of its rows in the endless order of the data."""
        count = self._config.warmup.rows_per_trajectory if carried.prompt_id.startswith("w") else 1
        return range(carried.first, carried.first + count)

    def check(self, carried: Carried, rows: Sequence[PromptRow]) -> None:
        """Compare the rows of a group with those that the data has in its place."""
        if carried.digest != (expected := digest_of(rows)):
            found, expected = f"rows of digest {carried.digest}", f"{expected}, by the order of the data"
            member = carried.first if carried.prompt_id.startswith(EVALUATION) else 0
            self._ledger.violations.add("wrong row", f"{carried.prompt_id}-{member}", found, expected)

    def _note(self, message: PromptIssued, rows: str) -> None:
        name, attempt = message.trajectory_id, message.attempt
        if message.seed != (seed := sampling_seed(self._config.seed, name, attempt)):
            self._ledger.violations.add("wrong seed", name, f"seed {message.seed}", f"{seed}, by the seed of the run")
        if not rows:
            return
        letter, number = message.prompt_id[0], int(message.prompt_id[1:])
        if letter == EVALUATION:
            first = message.member
        elif message.origin:
            first = place_again(message.origin)
        else:
            first = self._prompter.sources[letter].group(self._prompter.state, number).places.start
        for column, value in ((self._numbers, number), (self._firsts, first), (self._digests, int(rows, 16))):
            column.setdefault(letter, array("Q")).append(value)
