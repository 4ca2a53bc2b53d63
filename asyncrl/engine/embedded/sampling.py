"""From logits to tokens and their log-probs, for all running rows at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S40 = (np.uint64(shift) for shift in (27, 30, 31, 40))

GREEDY, PLAIN, TRUNCATED = 0, 1, 2
"""The ways to sample a row: the likeliest token; the whole distribution; a part of it (top-k, top-p, min-p)."""

ROW = np.dtype(
    [
        ("token", np.int64),
        ("position", np.int64),
        ("seed", np.uint64),
        ("kind", np.int64),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("min_p", np.float64),
    ]
)
"""State of one running row. One record, so that moving a row is one copy."""


class Sampled(NamedTuple):
    """One step's outcome for R rows."""

    tokens: torch.Tensor  # [R] int64
    logprobs: torch.Tensor  # [R] float32, natural log
    probs: torch.Tensor  # [R, vocab] that the log-probs are of


class Rows:
    """The running rows' state, and torch views of the same memory."""

    def __init__(self, capacity: int) -> None:
        self.records = np.zeros(capacity, ROW)
        self.tokens = torch.from_numpy(self.records["token"])
        self.positions = torch.from_numpy(self.records["position"])
        self._temperatures = torch.from_numpy(self.records["temperature"])

    def sample(self, logits: torch.Tensor) -> Sampled:
        """Draw one token for each of the first R rows.

        The log-prob is that of the softmax of `logits / temperature` *before* any cut to top-k, top-p or min-p, as
        SGLang reports it; a greedy row counts as temperature 1. A row's draw depends on its seed and position alone,
        so it is the same in any company (up to the rounding of the logits).

        Args:
            logits: [R, vocab] float32.
        """
        rows = len(logits)
        records = self.records[:rows]
        if (records["temperature"] != 1.0).any():
            logits = logits / self._temperatures[:rows].float().unsqueeze(1)
        probs = torch.softmax(logits, -1)
        draws = torch.from_numpy(uniforms(records["seed"], records["position"])).unsqueeze(1)
        kinds = records["kind"]
        tokens = inverse_cdf(probs, draws) if (kinds == PLAIN).all() else self._sample_mixed(probs, draws, kinds)
        return Sampled(tokens.squeeze(1), probs.gather(1, tokens).squeeze(1).log_(), probs)

    def advance(self, sampled: Sampled) -> None:
        """Append sampled tokens to the rows."""
        self.tokens[: len(sampled.tokens)] = sampled.tokens
        self.records["position"][: len(sampled.tokens)] += 1

    @staticmethod
    def likeliest(sampled: Sampled, row: int, top: int) -> list[tuple[float, int]]:
        """Return the log-probs and ids of the likeliest tokens in the place of a row's newest."""
        values, tokens = sampled.probs[row].topk(min(top, sampled.probs.shape[1]))
        return list(zip(values.log_().tolist(), tokens.tolist(), strict=True))

    def _sample_mixed(self, probs: torch.Tensor, draws: torch.Tensor, kinds: npt.NDArray[np.int64]) -> torch.Tensor:
        tokens = probs.argmax(-1, keepdim=True)
        for kind in (PLAIN, TRUNCATED):
            chosen = np.flatnonzero(kinds == kind)
            if chosen.size:
                rows = torch.from_numpy(chosen)
                if kind == PLAIN:
                    tokens[rows] = inverse_cdf(probs[rows], draws[rows])
                else:
                    tokens[rows] = truncated_inverse_cdf(probs[rows], draws[rows], self.records[chosen])
        return tokens


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Splitmix64's finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators")."""
    values = (values ^ (values >> _S30)) * _MIX_1
    values = (values ^ (values >> _S27)) * _MIX_2
    return values ^ (values >> _S31)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """[R] numbers in [0, 1), each a function of its seed and position."""
    mixed = mix(seeds + positions.astype(np.uint64) * _GOLDEN)
    return (mixed >> _S40).astype(np.float32) * np.float32(2.0**-24)


def inverse_cdf(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """[R, 1] index drawn in proportion to `weights` [R, V], which need not sum to one; `draws` [R, 1] in [0, 1).

    An index of weight zero is never drawn: the sum does not grow there, and a draw below 1 stays below the total.
    Of a row with NaN the last index is returned.
    """
    sums = weights.cumsum(-1)
    return torch.searchsorted(sums, draws * sums[:, -1:], right=True).clamp_(max=weights.shape[1] - 1)


def truncated_inverse_cdf(probs: torch.Tensor, draws: torch.Tensor, records: npt.NDArray[np.void]) -> torch.Tensor:
    """[R, 1] token ids drawn from what top-k, top-p and min-p leave of `probs` [R, V], cut in that order.

    As in SGLang, each cut looks at the untouched probabilities: the first k; those before which less than p has
    accumulated; those of at least min-p times the greatest. The likeliest token always stays.
    """

    def column(name: str) -> torch.Tensor:
        return torch.from_numpy(records[name].copy()).unsqueeze(1)

    ordered, ids = probs.sort(-1, descending=True)
    keep = torch.arange(probs.shape[1]) < column("top_k")
    keep &= (ordered.cumsum(-1) - ordered) <= column("top_p")
    keep &= ordered >= ordered[:, :1] * column("min_p").float()
    return ids.gather(1, inverse_cdf(ordered * keep, draws))
