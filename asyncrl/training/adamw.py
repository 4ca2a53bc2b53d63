"""AdamW (arXiv 1711.05101, algorithm 2) on weights and moments in 16 bits: one pass, each number read and written once.

Everything is computed in float32. torch's own AdamW would need float32 copies of rounded weights and moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from asyncrl.training.masters import Masters, joined_bits, split_bits

MOMENTS = ("exp_avg", "exp_avg_sq")

_ALIGNED = 16  # columns that a tensor is seen with: compiled kernels then read several numbers at once
_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class LocalAdamW(torch.optim.AdamW):
    """torch's own on the parts of sharded tensors that this rank has.

    Through the sharded tensors each call would be looked up by all of its arguments, while a GPU waits.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        found: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return found


class NarrowAdamW(torch.optim.Optimizer):
    """AdamW with a separate dtype for moments, for weights that may be masters stored in halves.

    Its state has the names and shapes of that of `torch.optim.AdamW`. The group's `scale` is a factor of gradients.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        *,
        eps: float,
        moments: torch.dtype,
        masters: Masters | None,
        compiled: bool,
    ) -> None:
        """
        Args:
            parameters: that are moved.
            moments: their type between updates.
            masters: of which these are parameters, if they are.
            compiled: whether the pass is one kernel instead of several.
        """
        super().__init__(parameters, {"lr": 0.0, "betas": (0.9, 0.999), "eps": eps, "weight_decay": 0.0, "scale": 1.0})
        self._moments, self._masters = moments, masters
        self._fast: dict[Callable[..., None], Callable[..., None]] = {}
        if compiled:
            self._fast = {kind: torch.compile(kind) for kind in (_move_whole, _move_halves)}

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        """Move the weights by their gradients."""
        for group in self.param_groups:
            known: dict[float, torch.Tensor] = {}  # by how many updates there were
            for parameter in group["params"]:
                state = self._state_of(parameter)
                state["step"] += 1
                count = float(state["step"])
                if count not in known:
                    known[count] = _numbers(group, count).to(parameter.device)
                self._move(parameter, [state[key] for key in MOMENTS], known[count])

    @torch.no_grad()
    def compile(self) -> None:
        """Compile the pass for tensors of any size."""
        group = self.param_groups[0]
        for parameter in group["params"][:1] if self._fast else []:
            kind, tensors = self._arguments(parameter, [parameter.new_empty(0, dtype=self._moments) for _ in MOMENTS])
            numbers = _numbers(group, 1.0).to(parameter.device)
            for rows in (2, 3):  # torch compiles the second size for all sizes
                self._fast[kind](*(one.new_zeros(rows, _ALIGNED) for one in tensors), numbers)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            assert parameter.grad is not None
            state |= {key: torch.zeros_like(parameter.grad, dtype=self._moments) for key in MOMENTS}
            state["step"] = torch.tensor(0.0)  # in host memory, for readers
        return state

    def _arguments(
        self, parameter: torch.Tensor, moments: list[torch.Tensor]
    ) -> tuple[Callable[..., None], list[torch.Tensor]]:
        """Return the pass over a parameter, and its tensors."""
        assert parameter.grad is not None
        halves = None if self._masters is None else self._masters.halves(parameter)
        weights = [parameter.detach()] if halves is None else list(halves)
        tensors = [local(one) for one in (*weights, parameter.grad, *moments)]
        return _move_whole if halves is None else _move_halves, tensors

    def _move(self, parameter: torch.Tensor, moments: list[torch.Tensor], numbers: torch.Tensor) -> None:
        kind, tensors = self._arguments(parameter, moments)
        if tensors[0].numel() % _ALIGNED == 0:
            self._fast.get(kind, kind)(*(one.view(-1, _ALIGNED) for one in tensors), numbers)
        else:
            kind(*tensors, numbers)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _numbers(group: dict[str, Any], count: float) -> torch.Tensor:
    """Return what `_moved` needs: made in float64, for 1 - beta in float32 has few digits."""
    (first, second), rate = group["betas"], group["lr"]
    kept, step, bias = 1.0 - rate * group["weight_decay"], rate / (1.0 - first**count), (1.0 - second**count) ** 0.5
    return torch.tensor([group["scale"], kept, 1.0 - first, second, 1.0 - second, step, bias, group["eps"]])


def _moved(
    exact: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor, numbers: torch.Tensor
) -> _Three:
    """Weights and moments after an update, in float32."""
    scale, kept, gain, decay, other, rate, bias, eps = numbers.unbind()
    gradient = gradient * scale
    mean = torch.lerp(first.float(), gradient, gain)
    square = second.float() * decay + other * gradient * gradient
    return exact * kept - rate * mean / (square.sqrt() / bias + eps), mean, square


def _move_whole(
    exact: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor, numbers: torch.Tensor
) -> None:
    moved, mean, square = _moved(exact, gradient, first, second, numbers)
    exact.copy_(moved)
    first.copy_(mean)
    second.copy_(square)


def _move_halves(rounded: torch.Tensor, rest: torch.Tensor, *others: torch.Tensor) -> None:
    gradient, first, second, numbers = others
    exact = joined_bits(rounded, rest).view(torch.float32)
    moved, mean, square = _moved(exact, gradient, first, second, numbers)
    near, away = split_bits(moved.view(torch.int32))
    rounded.copy_(near)
    rest.copy_(away)
    first.copy_(mean)
    second.copy_(square)
