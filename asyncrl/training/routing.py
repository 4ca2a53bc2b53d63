"""Routing replay: a token goes to the experts that it went to when it was sampled (arXiv 2510.11370, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.algorithms.rows import TrainRow
from asyncrl.training.protocol import RowError
from topics.wire import UInt8Array


class Mixture(NamedTuple):
    """The experts of a model, as many in each layer."""

    layers: int
    chosen: int  # of each token
    experts: int
    routed: tuple[int, ...]  # numbers of the layers that have experts, of those of this rank
    tokens: Callable[[int], Sequence[range]] = lambda length: [range(length)]  # the own layers, of this many


def recorded(routing: torch.Tensor, layers: int, experts: int) -> torch.Tensor:
    """Read what engines recorded.

    Args:
        routing: [T, B] bytes, one for each expert of up to 256, otherwise two.

    Returns:
        [T, layers, K] int64; all equal without a recording.
    """
    wide = routing if experts <= 256 else routing.contiguous().view(torch.int16)
    return wide.view(len(routing), layers, -1).long()


def as_bytes(chosen: torch.Tensor, experts: int) -> UInt8Array:
    """Write the experts of tokens, [T, layers, K], as `recorded` reads them."""
    return chosen.flatten(1).to(torch.uint8 if experts <= 256 else torch.int16).cpu().numpy().view(np.uint8)


class Recorded:
    """The experts that tokens of rows went to in a pass."""

    def __init__(self, taken: Callable[[], UInt8Array]) -> None:
        self._taken = taken  # gives those of all tokens of the newest micro-batch, packed; see `as_bytes`
        self._found: dict[int, UInt8Array] = {}  # by the `id` of the row

    def keep(self, rows: Sequence[TrainRow], places: npt.NDArray[np.int64]) -> None:
        """Take those of a micro-batch that just passed; the last token of a row was not fed.

        Args:
            places: see `MicroBatch`.
        """
        routing, start = self._taken(), 0
        for row in rows:
            end = start + len(row.tokens) - 1
            self._found[id(row)] = np.pad(routing[places[start:end]], ((0, 1), (0, 0)))
            start = end

    def of(self, row: TrainRow) -> UInt8Array | None:
        """Return the experts of a row, or its previous ones."""
        return self._found.get(id(row), row.routing)


def replayed(own: torch.Tensor, recorded: torch.Tensor | None) -> torch.Tensor:
    """Return the recorded experts [T, K], or the router's own for missing ones (equal experts mark those)."""
    if recorded is None:
        return own
    return torch.where((recorded == recorded[:, :1]).all(1, keepdim=True), own, recorded)


def check_routing(row: TrainRow, mixture: Mixture) -> None:
    """Refuse a row whose recorded experts are not of this model.

    Raises:
        RowError: names the found and the expected value.
    """
    if row.routing is None or row.routed is None:
        return
    experts = mixture.experts
    width = mixture.layers * mixture.chosen * (1 if experts <= 256 else 2)
    if row.routing.shape != (len(row.tokens), width):
        raise RowError(
            f"trajectory {row.trajectory_id}: routing of {list(row.routing.shape)} tokens and bytes of each, expected "
            f"{[len(row.tokens), width]}; engines serve another model than is trained: restart them with model.path"
        )
    numbers = row.routing if experts <= 256 else row.routing.view(np.uint16)
    if numbers.size and int(numbers.max()) >= experts:
        raise RowError(
            f"trajectory {row.trajectory_id}: routed to expert {int(numbers.max())}, expected 0 to {experts - 1}; "
            "engines serve another model than is trained: restart them with model.path"
        )
    chosen = numbers.reshape(len(row.tokens), mixture.layers, -1)[:, list(mixture.routed)]
    own = np.zeros(len(row.tokens), np.bool_)
    for part in mixture.tokens(len(row.tokens)):
        own[part.start : part.stop] = True
    _check_tokens(row, chosen, own & row.routed, mixture)


def _check_tokens(
    row: TrainRow, chosen: npt.NDArray[np.generic], known: npt.NDArray[np.bool_], mixture: Mixture
) -> None:
    """Refuse tokens that do not name different experts in every layer.

    Args:
        chosen: [tokens, layers, experts of each].
        known: [tokens] whose experts are recorded.
    """
    planes = np.ascontiguousarray(np.moveaxis(chosen, -1, 0))  # whose comparisons are many times as fast
    routed = (planes != planes[0]).any(0)  # [tokens, layers]
    if (torn := known & ~routed.all(1)).any():
        token = int(torn.argmax())
        layer = mixture.routed[int(routed[token].argmin())]
        raise RowError(
            f"trajectory {row.trajectory_id}: token {token} names no experts of layer {layer}, and those of others; "
            "an engine records every layer that has experts, or none: restart it, or serve the model that is trained"
        )
    twice = np.zeros_like(routed)
    for one, other in combinations(planes, 2):
        twice |= one == other
    if (torn := known & twice.any(1)).any():
        token = int(torn.argmax())
        place = int(twice[token].argmax())
        raise RowError(
            f"trajectory {row.trajectory_id}: token {token} names experts {chosen[token, place].tolist()} of layer "
            f"{mixture.routed[place]}, expected {mixture.chosen} different ones; the engine records what is no choice: "
            "start it anew with model.path"
        )
