"""Log-probabilities and entropies over a vocabulary whose rows are divided over tensor-parallel ranks.

Three numbers of each token are summed over ranks. Only the logits of one chunk of tokens exist at a time, on each rank
those of its own rows (`asyncrl.training.vocabulary`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from asyncrl.training.vocabulary import Kernels

_NOTHING = -1e30  # logit of a row of no token: its probability is 0, and it stays a number when multiplied


def kernels_of(rows: range, vocabulary: int, *, compiled: bool) -> Kernels:
    """Return the computations on the logits of this rank's rows: see `ParallelKernels`."""
    group = parallel_state.get_tensor_model_parallel_group()
    if dist.get_world_size(group) == 1:
        return Kernels(compiled=compiled)
    return ParallelKernels(group, rows=rows, vocabulary=vocabulary, compiled=compiled)


def _largest(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    return (logits.float() / temperatures[:, None]).amax(-1)


def _sums(
    logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, highest: torch.Tensor
) -> torch.Tensor:
    """Sums [3, C] over a rank's rows: of the weights, of these times the logits, and of the target's logit."""
    scaled = logits.float() / temperatures[:, None]
    weights = (scaled - highest[:, None]).exp()
    chosen = torch.arange(scaled.shape[-1], device=scaled.device) == targets[:, None]
    return torch.stack([weights.sum(-1), (weights * scaled).sum(-1), (scaled * chosen).sum(-1)])


class ParallelKernels(Kernels):
    """The computations on the logits of a rank's rows; targets and ids are counted from its first row."""

    def __init__(self, group: dist.ProcessGroup, *, rows: range, vocabulary: int, compiled: bool) -> None:
        """
        Args:
            group: of the tensor-parallel ranks.
            rows: of this rank that belong to tokens.
            vocabulary: rows of all ranks.
            compiled: whether the parts between exchanges are compiled.
        """
        super().__init__(compiled=compiled)
        self._group, self._rows, self._vocabulary, self.rows = group, rows, vocabulary, len(rows)
        parts: list[Callable[..., torch.Tensor]] = [_largest, _sums]
        self._largest, self._sums = map(torch.compile, parts) if compiled else parts
        self.score, self.most_probable = self._score, self._most_probable

    def _cut(self, logits: torch.Tensor) -> torch.Tensor:
        if len(self._rows) < logits.shape[-1]:
            logits[:, len(self._rows) :] = _NOTHING
        return logits

    def _score(
        self, logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, *ids: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return log-probs, entropies and the log of the sum of exponentials, [C] each, over all rows; see `_score`."""
        logits = self._cut(logits)
        highest = self._of_all(self._largest(logits, temperatures))
        sums = self._sums(logits, targets, temperatures, highest)
        dist.all_reduce(sums, group=self._group)
        total = highest + sums[0].log()
        outcomes = (self._outcomes(logits.float() / temperatures[:, None], one) - total[:, None] for one in ids)
        return sums[2] - total, total - sums[1] / sums[0], total, *outcomes

    def _outcomes(self, scaled: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Unnormalised log-probs of the outcomes of ids [C, K], [C, K + 1]; see `asyncrl.training.vocabulary`."""
        padded, places = _with_another(scaled, 0.0), self._places(ids, scaled.shape[-1])
        named = padded.gather(-1, places)
        dist.all_reduce(named, group=self._group)
        if ids.shape[-1] == self._vocabulary:
            return named
        others = padded.scatter(-1, places, -torch.inf)[:, :-1]
        highest = self._of_all(others.amax(-1))
        sums = (others - highest[:, None]).exp().sum(-1)
        dist.all_reduce(sums, group=self._group)
        return torch.cat([named, (highest + sums.log())[:, None]], -1)

    def _most_probable(
        self, logits: torch.Tensor, temperatures: torch.Tensor, number: int, vocabulary: int
    ) -> torch.Tensor:
        scaled = self._cut(logits).float() / temperatures[:, None]
        highest = self._of_all(scaled.amax(-1))
        sums = (scaled - highest[:, None]).exp().sum(-1)
        dist.all_reduce(sums, group=self._group)
        logprobs = scaled - (highest + sums.log())[:, None]
        logprobs[:, max(vocabulary - self._rows.start, 0) :] = -torch.inf
        values, ids = torch.nn.functional.pad(logprobs, (0, number), value=-torch.inf).topk(number)
        own = torch.stack([(ids + self._rows.start).float(), values], -1)
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(every, own, group=self._group)
        found = torch.cat(every, 1)
        best = found[..., 1].topk(number).indices
        return found.gather(1, best[..., None].expand(-1, -1, 2))

    def _of_all(self, highest: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(highest, dist.ReduceOp.MAX, self._group)
        return highest

    def _places(self, ids: torch.Tensor, other: int) -> torch.Tensor:
        """Columns of ids; another one for those of other ranks."""
        return ids.where((ids >= 0) & (ids < len(self._rows)), other)


def _with_another(logits: torch.Tensor, value: float) -> torch.Tensor:
    """Logits with a column for the ids of other ranks."""
    return torch.nn.functional.pad(logits, (0, 1), value=value)
