"""float32 master weights of a model that computes in 16 bits, where one process holds all of it (arXiv 1710.03740).

FSDP2 has masters of its own; a device that is alone would gather and cast each layer in every pass for nothing. Where
all weights are trained a master has memory only while an update moves it: between updates it is the rounded weight and
16 more bits, from which it comes back bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

_BITS = 16  # that rounding takes away
_LARGEST = (1 << 15) - 1  # of the bits that it leaves, without the sign


class Masters:
    """Exact weights by name, which an optimiser moves. Gradients of the model's own weights are summed into theirs."""

    def __init__(self, model: nn.Module, *, compiled: bool = False) -> None:
        """Take the weights of a model, and leave it rounded ones.

        Args:
            compiled: whether the two conversions are compiled: one pass over the weights each, instead of several.
        """
        self.parameters: dict[str, nn.Parameter] = {}
        # What rounding took away, of masters that are not whole between updates.
        self.rests: dict[str, torch.Tensor] = {}
        self._names: dict[torch.Tensor, str] = {}  # by the master
        self._rounded = dict(model.named_parameters())
        self._join: Callable[..., Any] = torch.compile(_join, dynamic=True) if compiled else _join
        self._split: Callable[..., Any] = torch.compile(_split, dynamic=True) if compiled else _split
        # Adapters are added to exact weights at each publication: these stay whole.
        spread = all(parameter.requires_grad for parameter in self._rounded.values())
        for name, parameter in self._rounded.items():
            own = parameter.detach().contiguous()
            # Memory of its own, which can be given back: that of a loaded model may be mapped from a file.
            master = nn.Parameter(own.clone() if spread else own, requires_grad=parameter.requires_grad)
            self.parameters[name], self._names[master] = master, name
            parameter.data = own.to(torch.bfloat16)
            if spread:
                self.rests[name] = torch.empty_like(own, dtype=torch.int16)
                self._give_back(name)
            if parameter.requires_grad:
                # As soon as it is whole: gradients in 16 bits would be rounded at each addition, and take memory.
                parameter.register_post_accumulate_grad_hook(partial(_add, master))  # type: ignore[no-untyped-call]

    @contextmanager
    def exact(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Let the masters among some tensors have their weights, and give the model the rounded ones after."""
        names = [self._names[tensor] for tensor in tensors if tensor in self._names]
        for name in names:
            if name in self.rests:
                master = self.parameters[name].detach()
                master.untyped_storage().resize_(master.numel() * master.itemsize)
                rounded, rest = self._rounded[name].detach(), self.rests[name]
                self._join(_flat(master, torch.int32), _flat(rounded, torch.int16), _flat(rest, torch.int16))
        try:
            yield
        finally:
            for name in names:
                if name in self.rests:
                    self._give_back(name)
                else:
                    self._rounded[name].detach().copy_(self.parameters[name].detach())

    def _give_back(self, name: str) -> None:
        """Round a master, and give back its memory."""
        master, rounded = self.parameters[name].detach(), self._rounded[name].detach()
        self._split(_flat(master, torch.int32), _flat(rounded, torch.int16), _flat(self.rests[name], torch.int16))
        master.untyped_storage().resize_(0)


def joined(rounded: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Return float32 weights of their bfloat16 ones and what the rounding took away."""
    exact = torch.empty_like(rounded, dtype=torch.float32, memory_format=torch.contiguous_format)
    _join(_flat(exact, torch.int32), _flat(rounded, torch.int16), _flat(rest, torch.int16))
    return exact


def _join(exact: torch.Tensor, rounded: torch.Tensor, rest: torch.Tensor) -> None:
    exact.copy_(rounded)
    exact <<= _BITS
    exact += rest


def _split(exact: torch.Tensor, rounded: torch.Tensor, rest: torch.Tensor) -> None:
    """Round bits of float32 to the nearest bfloat16; of two that are as near, away from zero.

    To the even one, as is usual, 2^16 + 1 numbers would be rounded to one: 16 bits could not tell them. What is no
    number stays none, with other bits.
    """
    near = exact >> _BITS
    # Beyond the largest bits are those of zero: the NaN that GPUs make, all ones, must not be rounded up to it.
    near += (exact >> (_BITS - 1)) & ((near & _LARGEST) != _LARGEST)
    rounded.copy_(near)
    rest.copy_(exact - (near << _BITS))


def _flat(tensor: torch.Tensor, bits: torch.dtype) -> torch.Tensor:
    return tensor.view(bits).view(-1)


def _add(master: nn.Parameter, parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad += parameter.grad
    parameter.grad = None
