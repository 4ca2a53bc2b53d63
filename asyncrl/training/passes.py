"""Passes of a model over rows, in micro-batches and on every rank as many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from asyncrl.algorithms.packing import first_fit
from asyncrl.algorithms.rows import TOP, TrainRow, weightless
from asyncrl.algorithms.sums import Sums, merge_sums
from asyncrl.training.packing import MicroBatch, by_row, micro_batch
from asyncrl.training.prefix_tree import prefix_tree, sharing

T = TypeVar("T")

Scorer: TypeAlias = Callable[..., tuple[torch.Tensor, ...]]
"""Values of N tokens, [N, ...], from the arguments of `Policy.forward` and unused ones."""


class Passes:
    """Common parts of passes with and without a gradient."""

    def __init__(
        self,
        device: torch.device,
        *,
        micro_batch_tokens: int,
        group: dist.ProcessGroup | None = None,
        shared: bool = False,
    ) -> None:
        """
        Args:
            shared: compute tokens that rows of a micro-batch have in common once.
        """
        self._device = device
        self._shared = shared
        self._budget = micro_batch_tokens  # of one pass
        self._group = group  # of the ranks with different rows, if not all
        self.ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0

    def cut(self, rows: Sequence[TrainRow]) -> list[list[TrainRow]]:
        """Micro-batches."""
        units = self._units(rows)
        sizes = [len(unit[0].tokens) if len(unit) == 1 else tree_size(unit) for unit in units]
        return [[row for index in batch for row in units[index]] for batch in first_fit(sizes, self._budget)]

    def _units(self, rows: Sequence[TrainRow]) -> list[list[TrainRow]]:
        """Rows that stay together: those that share a prefix, as many as the budget holds."""
        if not self._shared:
            return [[row] for row in rows]
        found: list[list[TrainRow]] = []
        for numbers in sharing([row.tokens[:-1] for row in rows]):
            unit: list[TrainRow] = []
            for number in numbers:
                if unit and tree_size([*unit, rows[number]]) > self._budget:
                    found.append(unit)
                    unit = []
                unit.append(rows[number])
            found.append(unit)
        return found

    def even(self, batches: list[list[TrainRow]], columns: Sequence[str] = ()) -> list[list[TrainRow]]:
        """As many on every rank, for FSDP2 gathers parameters in step; the surplus ones weigh nothing."""
        if self.ranks == 1:
            return batches  # and no value is read from the device, because it may be copying weights
        count = torch.tensor([len(batches)], device=self._device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self._group)
        return batches + [[weightless(columns)]] * (int(count.item()) - len(batches))

    def lay(self, rows: Sequence[TrainRow], columns: Sequence[str] = ()) -> MicroBatch:
        """Rows as tensors."""
        return micro_batch(rows, self._device, columns, shared=self._shared)

    def column(
        self, scorer: Scorer, rows: Sequence[TrainRow], after: Callable[[list[TrainRow]], None] | None = None
    ) -> dict[int, npt.NDArray[np.float32]]:
        """A scorer's values of trained tokens, [T, ...] each, by the `id` of the row. Every rank takes part.

        Args:
            after: called with the rows of each micro-batch after its pass.
        """
        found: dict[int, npt.NDArray[np.float32]] = {}
        for batch in self.even(self.cut(rows)):
            with torch.no_grad():
                values, *_ = scorer(*self.lay(batch).inputs)
            if after is not None:
                after(batch)
            found |= zip(map(id, batch), by_row(values, batch), strict=True)
        return found

    def outcomes(self, scorer: Scorer, rows: Sequence[TrainRow]) -> dict[int, npt.NDArray[np.float32]]:
        """A scorer's log-probs of the ids in the column `TOP` and of all others, [T, K + 1] each; see `column`."""
        found: dict[int, npt.NDArray[np.float32]] = {}
        for batch in self.even(self.cut(rows), (TOP,)):
            laid = self.lay(batch, (TOP,))
            with torch.no_grad():
                *_, values = scorer(*laid.inputs, wanted=laid.tokens.columns[TOP][..., 0].long())
            found |= zip(map(id, batch), by_row(values, batch), strict=True)
        return found

    def gathered(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Values of all ranks, each with as many as it has."""
        if self.ranks == 1:
            return values
        return np.concatenate(self.of_all(values))

    def of_all(self, value: T) -> list[T]:
        """Return the value of each rank, in their order."""
        parts = [value] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(parts, value, group=self._group)
        return parts

    def sums(self, parts: list[Sums]) -> Sums:
        """Merge the sums of micro-batches, and of all ranks."""
        sums = merge_sums(parts)
        if self.ranks == 1 or not sums:
            return sums
        gathered = [torch.zeros(len(sums), device=self._device) for _ in range(self.ranks)]
        dist.all_gather(gathered, torch.stack(list(sums.values())), group=self._group)
        return merge_sums([dict(zip(sums, values, strict=True)) for values in gathered])


def tree_size(rows: Sequence[TrainRow]) -> int:
    """Number of tokens that rows feed where shared prefixes count once."""
    return prefix_tree([row.tokens[:-1] for row in rows]).size
