"""Weight matrices, packed or views of a shared file; and experts, each with its own matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from asyncrl.engine.embedded.config import ExpertsConfig

_PACKED_ROWS = 12
"""From this many rows on, oneDNN's packed product wins over MKL's; on AMD processors it is twice as fast at 64."""

_BOTH_BYTES = 1 << 20
"""Larger matrices are kept in the packed form alone, which takes half the memory."""

_ROWS_STEP = 16
"""Rows are padded to a multiple of this: oneDNN compiles a product for each number of rows, which takes up to a
millisecond, and keeps 1,024 of them.
"""


def _packing_works(dtype: torch.dtype) -> bool:
    """Return whether torch has the operators here, which its compiler emits and which are not public."""
    probe = torch.eye(16, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(probe, None)
        product = torch.ops.mkldnn._linear_pointwise(probe, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.equal(product, probe)


_PACKED = {dtype for dtype in (torch.float32, torch.bfloat16) if _packing_works(dtype)}


class Matrix:
    """`x @ weight.T + bias` for a fixed weight [outputs, inputs]."""

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None) -> None:
        weight = weight.to(dtype).contiguous()
        self._bias = None if bias is None else bias.to(dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None) if dtype in _PACKED else None
        self._weight = weight if self._packed is None or weight.nbytes <= _BOTH_BYTES else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, inputs] to a new tensor [N, outputs]."""
        rows = len(x)
        if self._weight is not None and (self._packed is None or rows < _PACKED_ROWS):
            return F.linear(x, self._weight, self._bias)
        beyond = -rows % _ROWS_STEP if rows > 1 else 0  # a single row has a product of its own
        if beyond:
            x = F.pad(x, (0, 0, 0, beyond))
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product[:rows] if beyond else product


@dataclass(slots=True, eq=False)
class MappedMatrix:
    """`(x * gain) @ weight.T`, with reordered outputs, of weights that are read in place.

    What `Matrix` folds into a copy of the weights is applied to the activations here, so that every process of a host
    shares the pages of one file.
    """

    parts: Sequence[torch.Tensor]  # each [outputs, inputs]; their outputs follow one another
    gain: torch.Tensor | None = None  # [inputs], of the norm before
    _: KW_ONLY
    order: torch.Tensor | None = None  # [outputs] int64, which output comes where
    scale: torch.Tensor | None = None  # [outputs], of the outputs in their new order
    bias: torch.Tensor | None = None  # [outputs], the same

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, inputs] to a new tensor [N, outputs]."""
        if self.gain is not None:
            x = x * self.gain
        products = [F.linear(x, part) for part in self.parts]
        product = torch.cat(products, 1) if len(products) > 1 else products[0]
        if self.order is not None:
            product = product.index_select(1, self.order)
        if self.scale is not None:
            product.mul_(self.scale)
        return product if self.bias is None else product.add_(self.bias)


Product: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class Experts:
    """A mixture of gated feed-forward layers, of which each token takes a few (arXiv 2505.09388, section 2)."""

    def __init__(self, config: ExpertsConfig, router: Product, experts: Sequence[tuple[Product, Product]]) -> None:
        self._config = config
        self._router = router  # [N, H] to [N, E]
        self._experts = experts  # per expert, [M, H] to gates and up projections, [M, 2F], and [M, F] to [M, H]

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose the experts of each token: [N, E] to [N, K]."""
        return logits.topk(self._config.chosen, -1).indices

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the chosen experts make of [N, H], a new tensor, and their numbers, [N, K]."""
        logits = self._router(x).float()
        chosen = self.choose(logits)
        if self._config.normalised:
            shares = logits.gather(1, chosen).softmax(-1)
        else:
            shares = logits.softmax(-1).gather(1, chosen)
        shares, found = shares.to(x.dtype), torch.zeros_like(x)
        for number in sorted(set(chosen.flatten().tolist())):
            gate_up, down = self._experts[number]
            rows, places = torch.where(chosen == number)
            gate, up = gate_up(x[rows]).chunk(2, -1)
            found.index_add_(0, rows, down(F.silu(gate).mul_(up)).mul_(shares[rows, places].unsqueeze(1)))
        return found, chosen
