"""Matrices with fewer bits, and back: FP8 in blocks, INT4 in groups. See `asyncrl.data.quantisation` for their names.

FP8 (DeepSeek-V3, arXiv 2412.19437, 3.3): the 128 x 128 values of a block are divided by their scale, the largest of
them over 448, and rounded to e4m3; `weight_scale_inv` has the scales. In the form `ue8m0` a scale is the next power of
two. INT4 (compressed-tensors, symmetric groups): the 32 values of a group are divided by their scale and rounded to -8
to 7; an int32 has eight of them, the first one in its lowest bits, each with 8 added. The scale is the largest value
over 7.5, as in compressed-tensors, or over 7 or 8 if the group then loses less: so quantised values survive a second
quantisation unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch.nn import functional

from asyncrl.data.model_dir import INVERSE, PACKED, PACKED_COLUMNS, SCALE, SHAPE, WEIGHT
from asyncrl.data.quantisation import BLOCK, GROUP, Form

_FP8, _FP8_LARGEST = torch.float8_e4m3fn, 448.0
_INT4_LARGEST = (7.5, 7.0, 8.0)  # steps that the largest value of a group may be
_LEAST = 1e-12  # scale of a block of zeros


class Stored(NamedTuple):
    """A tensor of a quantised matrix on disk."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_as(form: Form, name: str, shape: tuple[int, ...]) -> list[Stored]:
    """Return the tensors that a matrix, [out, in], has on disk, in the order of `quantise`."""
    module, (rows, columns) = name.removesuffix(WEIGHT), shape
    if form != "int4-groups":
        blocks = -(-rows // BLOCK), -(-columns // BLOCK)
        return [Stored(name, _FP8, shape), Stored(module + INVERSE, torch.float32, blocks)]
    return [
        Stored(module + PACKED, torch.int32, (rows, columns // PACKED_COLUMNS)),
        Stored(module + SCALE, torch.bfloat16, (rows, columns // GROUP)),
        Stored(module + SHAPE, torch.int64, (2,)),
    ]


def quantise(form: Form, weight: torch.Tensor) -> list[torch.Tensor]:
    """Return a matrix, [out, in], as the tensors of `stored_as`. Values that are not finite give scales that are not
    finite.
    """
    exact = weight.float()
    return _to_groups(exact) if form == "int4-groups" else _to_blocks(exact, powers=form == "fp8-blocks-ue8m0")


def _to_blocks(weight: torch.Tensor, *, powers: bool) -> list[torch.Tensor]:
    rows, columns = weight.shape
    filled = functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = filled.view(filled.shape[0] // BLOCK, BLOCK, filled.shape[1] // BLOCK, BLOCK)
    scales = (blocks.abs().amax((1, 3)) / _FP8_LARGEST).clamp_min(_LEAST)
    if powers:  # the next one, so that no value leaves the range
        mantissa, exponent = scales.frexp()
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    scaled = (blocks / scales[:, None, :, None]).clamp(-_FP8_LARGEST, _FP8_LARGEST)
    return [scaled.view(filled.shape)[:rows, :columns].to(_FP8), scales]


def _to_groups(weight: torch.Tensor) -> list[torch.Tensor]:
    groups = weight.view(len(weight), -1, GROUP)
    largest = groups.abs().amax(2)
    scales, steps, loss = _of_scales(groups, largest / _INT4_LARGEST[0])
    for other in _INT4_LARGEST[1:]:
        found = _of_scales(groups, largest / other)
        better = found[2] < loss
        scales, loss = torch.where(better, found[0], scales), torch.where(better, found[2], loss)
        steps = torch.where(better[..., None], found[1], steps)
    shifts = torch.arange(0, 4 * PACKED_COLUMNS, 4, dtype=torch.int32, device=weight.device)
    packed = ((steps + 8).view(len(weight), -1, PACKED_COLUMNS) << shifts).sum(2, dtype=torch.int32)
    return [packed, scales, torch.tensor(weight.shape, device=weight.device)]


def _of_scales(groups: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return stored scales, the steps of each value, and the sum of squared errors of each group."""
    kept = scales.clamp_min(_LEAST).bfloat16()
    wide = kept.float()[..., None]
    steps = (groups / wide).round().clamp(-8, 7)
    return kept, steps.to(torch.int32), (steps * wide - groups).square().sum(2)


def plain_names(names: Collection[str]) -> set[str]:
    """From the names on disk to the names of the represented tensors."""
    return {
        name.removesuffix(PACKED) + WEIGHT if name.endswith(PACKED) else name
        for name in names
        if not name.endswith((INVERSE, SCALE, SHAPE))
    }


def read_plain(name: str, names: Collection[str], read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Read a tensor, in float32 if it is quantised.

    Args:
        name: the unquantised name.
        names: on disk.
        read: reads one of these.
    """
    module = name.removesuffix(WEIGHT)
    if module + INVERSE in names:
        return _of_blocks(read(name), read(module + INVERSE))
    if module + PACKED in names:
        return _of_groups(read(module + PACKED), read(module + SCALE))
    return read(name)


def _of_blocks(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    spread = scales.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return weight.float() * spread


def _of_groups(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(0, 4 * PACKED_COLUMNS, 4, dtype=torch.int32, device=packed.device)
    steps = ((packed[..., None] >> shifts) & 15) - 8
    return steps.flatten(1).float() * scales.float().repeat_interleave(GROUP, 1)
