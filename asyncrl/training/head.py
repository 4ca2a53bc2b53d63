"""The head of a transformers model: from last hidden states to logits, with a factor and a bound of some families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.data.model_dir import ModelError

_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Head:
    """Logits are `bound * tanh(factor * product / bound)`, or without a bound `factor * product`."""

    module: Any  # linear, from H to the vocabulary
    factor: float = 1.0
    bound: float = 0.0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits, [..., V], of last hidden states, [..., H]."""
        return bounded(self.factor * self.module(hidden), self.bound)


def bounded(logits: torch.Tensor, bound: float) -> torch.Tensor:
    """Return logits within a bound, if there is one."""
    return bound * torch.tanh(logits / bound) if bound else logits


class _Hidden:
    """The output of layers that gives the last hidden states, and has nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, _name: str) -> None:
        return None

    def __getitem__(self, _number: int) -> torch.Tensor:
        return self.last_hidden_state


def decoder_of(model: Any) -> Any:
    """Return the layers of a causal language model, with embedding and last norm.

    Raises:
        ModelError: the model has no head, or no list of layers.
    """
    candidates = (model.base_model, model.get_decoder(), getattr(model, "model", None))
    base = next((one for one in candidates if one is not model and hasattr(one, "layers")), None)
    if base is None or model.get_output_embeddings() is None:
        raise ModelError(
            f"{type(model).__name__} has no head on a list of layers; asyncrl cannot train this model, name another"
        )
    return base


def read_head(model: Any) -> Head:
    """Find what a model does with the product of its head.

    Raises:
        ModelError: that is neither a factor nor a bound.
    """
    base, config, module = decoder_of(model), model.config.get_text_config(), model.get_output_embeddings()
    weight = module.weight
    bound = float(getattr(config, "final_logit_softcapping", None) or 0.0)
    if weight.is_meta:  # a shape without numbers
        return Head(module, bound=bound)
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 1, weight.shape[1], generator=random, device="cpu").to(weight)
    with torch.no_grad():
        found, product = _logits_of(model, base, hidden).float(), module(hidden).float()
    linear = bound * torch.atanh((found / bound).clamp(-0.999999, 0.999999)) if bound else found
    least = product.abs() > product.abs().mean()
    factor = float((linear[least] / product[least]).median())
    factor = 1.0 if abs(factor - 1.0) < _TOLERANCE else factor
    head = Head(module, factor, bound)
    if not torch.allclose(head.logits(hidden).float(), found, rtol=1e-3, atol=_TOLERANCE):
        raise ModelError(
            f"{type(model).__name__} changes the logits of its head otherwise than by a factor or "
            "final_logit_softcapping; asyncrl cannot train this model, name another"
        )
    return head


def _logits_of(model: Any, base: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits that a model has where its layers give these hidden states."""
    base.forward = lambda *_arguments, **_options: _Hidden(hidden)
    try:
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    finally:
        del base.forward
    return logits
