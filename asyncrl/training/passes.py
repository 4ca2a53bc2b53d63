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
from asyncrl.training.packing import MicroBatch, by_row, fed, micro_batch
from asyncrl.training.prefix_tree import prefix_tree, subtrees

T = TypeVar("T")

Scorer: TypeAlias = Callable[..., tuple[torch.Tensor, ...]]
"""Values of N tokens, [N, ...], from the arguments of `Policy.forward` and unused ones."""
AfterPass: TypeAlias = Callable[[list[TrainRow], npt.NDArray[np.int64]], None]
"""Takes the rows of a micro-batch and `MicroBatch.places`."""


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
        self.budget = micro_batch_tokens  # of one pass
        self._group = group  # of the ranks with different rows, if not all
        self.ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.processes = dist.get_world_size() if dist.is_initialized() else 1  # also those with the same rows

    def cut(self, rows: Sequence[TrainRow]) -> list[list[TrainRow]]:
        """Micro-batches; rows that share a prefix stay together, as many as the budget holds."""
        if self._shared and rows:
            units = subtrees(prefix_tree(fed(rows)), self.budget)
        else:
            units = [([number], len(row.tokens)) for number, row in enumerate(rows)]
        batches = first_fit([size for _, size in units], self.budget)
        return [[rows[number] for unit in batch for number in units[unit][0]] for batch in batches]

    def work(self, batches: list[list[TrainRow]]) -> dict[str, float]:
        """Figures of the tokens that pass the model on all ranks: their number, and its share of those of the rows."""
        separate = sum(len(row.tokens) - 1 for rows in batches for row in rows)
        computed = sum(prefix_tree(fed(rows)).size for rows in batches) if self._shared else separate
        counts = {"computed": computed, "separate": separate}
        found = self.sums([{name: torch.tensor(float(count), device=self._device) for name, count in counts.items()}])
        total = float(found["computed"])
        return {"tokens_computed": total, "tree_ratio": total / max(float(found["separate"]), 1.0)}

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
        self, scorer: Scorer, rows: Sequence[TrainRow], after: AfterPass | None = None
    ) -> dict[int, npt.NDArray[np.float32]]:
        """A scorer's values of trained tokens, [T, ...] each, by the `id` of the row. Every rank takes part.

        Args:
            after: called with each micro-batch after its pass.
        """
        found: dict[int, npt.NDArray[np.float32]] = {}
        for batch in self.even(self.cut(rows)):
            laid = self.lay(batch)
            with torch.no_grad():
                values, *_ = scorer(*laid.inputs)
            if after is not None:
                after(batch, laid.places)
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
