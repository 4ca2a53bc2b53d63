"""float32 master weights of a model that computes in 16 bits, where one process holds all of it (arXiv 1710.03740).

FSDP2 has masters of its own; a device that is alone would gather and cast each layer in every pass for nothing.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn


class Masters:
    """Exact weights by name, which an optimiser moves. Gradients of the model's own weights are summed into theirs."""

    def __init__(self, model: nn.Module) -> None:
        """Take the weights of a model, which gets rounded ones after."""
        self.parameters: dict[str, nn.Parameter] = {}
        self._rounded = dict(model.named_parameters())
        for name, parameter in self._rounded.items():
            master = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            self.parameters[name] = master
            if parameter.requires_grad:
                # As soon as it is whole: gradients in 16 bits would be rounded at each addition, and take memory.
                parameter.register_post_accumulate_grad_hook(partial(_add, master))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def round(self) -> None:
        """Give the model the weights of now."""
        torch._foreach_copy_(list(self._rounded.values()), list(self.parameters.values()))


def _add(master: nn.Parameter, parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad += parameter.grad
    parameter.grad = None
