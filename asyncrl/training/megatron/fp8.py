"""Products of linear layers in FP8 by Transformer Engine.

Scales are those of arXiv 2412.19437, section 3.3.2: one for 128 channels of a token, and one for a block of 128 x 128
of a weight, as published FP8 checkpoints have them. All numbers are E4M3, also those of gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from transformer_engine.pytorch import DType, is_fp8_block_scaling_available
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.tensor import Float8BlockQuantizer

from asyncrl.data.quantisation import BLOCK


def product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return what `F.linear` does: [..., out] of hidden states [..., in] and a weight [out, in]."""
    if not _in_blocks(weight):
        return F.linear(hidden, weight, bias)
    rows = hidden.flatten(0, -2)
    missing = -len(rows) % BLOCK
    filled = F.pad(rows, (0, 0, 0, missing)) if missing else rows  # which would be copied
    made: torch.Tensor = _product(filled, weight)
    made = made[: len(rows)].view(*hidden.shape[:-1], -1)
    return made if bias is None else made + bias


def absence() -> str:
    """Return why Transformer Engine cannot multiply in FP8 here; empty if it can."""
    _, reason = is_fp8_block_scaling_available(return_reason=True)
    return str(reason)


def _in_blocks(weight: torch.Tensor) -> bool:
    return weight.shape[0] % BLOCK == 0 and weight.shape[1] % BLOCK == 0


def _quantised(matrix: torch.Tensor, *, square: bool = False, along: bool = False, across: bool = False) -> Any:
    """Return the numbers and scales of a matrix.

    Args:
        square: with one scale for each block of a weight.
        along: for sums along rows.
        across: for sums along columns.
    """
    quantizer = Float8BlockQuantizer(
        DType.kFloat8E4M3,
        rowwise=along,
        columnwise=across,
        force_pow_2_scales=False,  # as in checkpoints: an engine's FP8 weights are then those that were trained with
        block_scaling_dim=2 if square else 1,
    )
    quantizer.internal = True
    return quantizer(matrix.contiguous())


def _weight(matrix: torch.Tensor, *, across: bool = False) -> Any:
    return _quantised(matrix, square=True, along=True, across=across)


@torch.library.custom_op("asyncrl::fp8_product", mutates_args=())
def _product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return general_gemm(_weight(weight), _quantised(rows, along=True), out_dtype=rows.dtype)[0]  # type: ignore[no-any-return]


@torch.library.custom_op("asyncrl::fp8_gradients", mutates_args=())
def _gradients(grad: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    given, how = _quantised(grad, along=True, across=True), {"out_dtype": grad.dtype, "grad": True}
    of_rows = general_gemm(_weight(weight, across=True), given, layout="NN", **how)[0]
    return of_rows, general_gemm(_quantised(rows, across=True), given, layout="NT", **how)[0]


@_product.register_fake
def _product_shape(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(len(rows), len(weight))


@_gradients.register_fake
def _gradient_shapes(
    _grad: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    of_rows, of_weight = _gradients(grad, *ctx.saved_tensors)
    return of_rows, of_weight


_product.register_autograd(_backward, setup_context=_keep)
