"""Weight matrices: packed copies for the quickest product, or views of a file that processes share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

_PACKED_ROWS = 12
"""From this many rows on, oneDNN's packed product wins over MKL's; on AMD processors it is twice as fast at 64."""


def _packing_works() -> bool:
    """Return whether this build of torch has the operators, which torch's compiler emits and which are not public."""
    probe = torch.eye(16)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(probe, None)
        product = torch.ops.mkldnn._linear_pointwise(probe, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.equal(product, probe)


_PACKED = _packing_works()


class Matrix:
    """`x @ weight.T + bias` for a fixed weight [outputs, inputs]."""

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None) -> None:
        self._weight = weight.to(dtype).contiguous()
        self._bias = None if bias is None else bias.to(dtype)
        pack = _PACKED and dtype == torch.float32
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, None) if pack else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, inputs] to a new tensor [N, outputs]."""
        if self._packed is None or len(x) < _PACKED_ROWS:
            return F.linear(x, self._weight, self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product


class MappedMatrix:
    """`(x * gain) @ weight.T`, with its outputs in another order, of weights that are read where they lie.

    What `Matrix` folds into a copy of the weights is applied to the activations here, so that every process of a host
    shares the pages of one file.
    """

    __slots__ = ("_bias", "_gain", "_order", "_parts", "_scale")

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        gain: torch.Tensor | None = None,
        *,
        order: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            parts: each [outputs, inputs]; their outputs follow one another.
            gain: [inputs], of the norm before.
            order: [outputs] int64, which output comes where.
            scale: [outputs], of the outputs in their new order.
            bias: [outputs], the same.
        """
        self._parts = parts
        self._gain = gain
        self._order = order
        self._scale = scale
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, inputs] to a new tensor [N, outputs]."""
        if self._gain is not None:
            x = x * self._gain
        products = [F.linear(x, part) for part in self._parts]
        product = torch.cat(products, 1) if len(products) > 1 else products[0]
        if self._order is not None:
            product = product.index_select(1, self._order)
        if self._scale is not None:
            product.mul_(self._scale)
        return product if self._bias is None else product.add_(self._bias)
