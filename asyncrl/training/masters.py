"""float32 master weights of a model that computes in 16 bits on one process (arXiv 1710.03740).

FSDP2 keeps its own masters, but on a single device it would gather and cast each layer in every pass for nothing. If
all weights are trained, a master needs no extra copy: it is the rounded weight plus 16 more bits, and is restored bit
for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

_BITS = 16  # that rounding takes away
_LARGEST = (1 << 15) - 1  # of the bits that it leaves, without the sign


class Masters:
    """Exact weights by name, which an optimiser moves. Gradients of the model's own weights are summed into theirs."""

    def __init__(self, model: nn.Module, *, halves: bool = True) -> None:
        """Take the weights of a model, and leave it rounded ones.

        Args:
            halves: whether masters share memory with the rounded weights, where all weights are trained.
        """
        self.parameters: dict[str, nn.Parameter] = {}
        self.rests: dict[str, torch.Tensor] = {}  # what rounding took away, of masters that are not whole
        self._names: dict[torch.Tensor, str] = {}  # by the master
        self._rounded = dict(model.named_parameters())
        # Adapters are added to exact weights at each publication: these stay whole.
        spread = halves and all(parameter.requires_grad for parameter in self._rounded.values())
        for name, parameter in self._rounded.items():
            own = parameter.detach().contiguous()
            # Separate memory that can be released, because the memory of a loaded model may be mapped from a file.
            master = nn.Parameter(own.clone() if spread else own, requires_grad=parameter.requires_grad)
            self.parameters[name], self._names[master] = master, name
            parameter.data = own.to(torch.bfloat16)
            if spread:
                self.rests[name] = torch.empty_like(own, dtype=torch.int16)
                self._give_back(name)
            if parameter.requires_grad:
                # Add the gradient as soon as it is complete: 16-bit gradients would be rounded at each addition, and
                # take memory.
                parameter.register_post_accumulate_grad_hook(partial(_add, master))  # type: ignore[no-untyped-call]

    def halves(self, master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the bits of a master as the rounded weight and the rest, int16 each; None if it is stored whole."""
        name = self._names[master]
        if name not in self.rests:
            return None
        return self._rounded[name].detach().view(torch.int16), self.rests[name]

    def round(self) -> None:
        """Give the model what whole masters are now."""
        for name, parameter in self._rounded.items():
            if name not in self.rests and parameter.requires_grad:
                parameter.detach().copy_(self.parameters[name].detach())

    @contextmanager
    def exact(self, master: torch.Tensor) -> Iterator[None]:
        """Let a master have memory, and give the model its rounded weight after."""
        name, own = self._names[master], master.detach()
        if name in self.rests:
            own.untyped_storage().resize_(own.numel() * own.itemsize)
            own.view(torch.int32).copy_(joined_bits(self._rounded[name].detach().view(torch.int16), self.rests[name]))
        try:
            yield
        finally:
            if name in self.rests:
                self._give_back(name)
            else:
                self._rounded[name].detach().copy_(own)

    def _give_back(self, name: str) -> None:
        """Round a master, and give back its memory."""
        master, rounded = self.parameters[name].detach(), self._rounded[name].detach()
        near, rest = split_bits(master.view(torch.int32))
        rounded.view(torch.int16).copy_(near)
        self.rests[name].copy_(rest)
        master.untyped_storage().resize_(0)


def joined(rounded: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Return float32 weights of their bfloat16 ones and what the rounding took away."""
    return joined_bits(rounded.contiguous().view(torch.int16), rest).view(torch.float32)


def joined_bits(rounded: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Return the bits of float32, int32, of what `split_bits` made of them."""
    return (rounded.int() << _BITS) + rest


def split_bits(exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round bits of float32 to the nearest bfloat16; of two that are as near, away from zero.

    To the even one, as is usual, 2^16 + 1 numbers would be rounded to one: 16 bits do not hold both. NaN stays NaN,
    with other bits.

    Returns:
        The bits of the bfloat16, and what the rounding took away, in int16.
    """
    near = exact >> _BITS
    # Beyond the largest bits are those of zero: the NaN that GPUs make, all ones, must not be rounded up to it.
    near = near + ((exact >> (_BITS - 1)) & ((near & _LARGEST) != _LARGEST))
    return near.short(), (exact - (near << _BITS)).short()


def _add(master: nn.Parameter, parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad += parameter.grad
    parameter.grad = None
