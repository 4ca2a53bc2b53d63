"""A weight matrix that multiplies by whichever library is quickest for the number of rows."""

from __future__ import annotations

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
