"""All losses by their name in `learner.loss`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.algorithms.clipped_losses import Decoupled, Gspo, Ppo
from asyncrl.algorithms.distillation import distilled
from asyncrl.algorithms.held_losses import Cispo, Dppo, Reinforce
from asyncrl.algorithms.hindsight import guided
from asyncrl.algorithms.named import AlgorithmError, Table, guarded, named, with_call
from asyncrl.algorithms.sapo import Sapo
from asyncrl.algorithms.token_loss import Loss, Tokens

if TYPE_CHECKING:
    import torch

    from asyncrl.algorithms.token_loss import Sums
    from topics.batches import Objective


class Sft(Loss, frozen=True):
    """Weighted negative log-likelihood; the reward is ignored. The warm-up's loss."""

    @property
    def uses_advantages(self) -> bool:
        return False

    def __call__(self, logprobs: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, Sums]:
        logprobs, trained = logprobs.float(), tokens.weights > 0
        sums = {"tokens": trained.sum(), "nll": -(logprobs.detach() * trained).sum()}
        return -(tokens.weights * logprobs).sum(), sums


def _of_user(found: Any) -> type[Loss]:
    """A class of losses, or one without options whose call is a function of (logprobs, tokens)."""
    if isinstance(found, type):
        if not issubclass(found, Loss):
            raise TypeError("it is a class, but none derived from asyncrl.Loss; derive it, or name a function")
        if bare := [field.name for field in msgspec.structs.fields(found) if field.required]:
            raise TypeError(f"its option {bare[0]} has no default; give it one, such as `{bare[0]}: float = 1.0`")
        return with_call(found, guarded(found.__call__))
    computes = guarded(found)
    return with_call(Loss, lambda _self, logprobs, tokens: computes(logprobs, tokens))


_BUILT_IN: dict[str, type[Loss]] = {
    "decoupled": Decoupled,
    "ppo": Ppo,
    "gspo": Gspo,
    "cispo": Cispo,
    "reinforce": Reinforce,
    "dppo": Dppo,
    "sapo": Sapo,
    "sft": Sft,
}
LOSSES = Table(_BUILT_IN, _of_user)
"""Losses by their name in `learner.loss`."""


def loss_of(objective: Objective) -> Loss:
    """The loss that an objective names, with its options, and with what a teacher adds to it.

    Raises:
        AlgorithmError: there is no such loss, or it has no such options.
    """
    loss = named(LOSSES, objective.loss, "loss")
    try:
        made = msgspec.convert(objective.loss_options, loss)
    except msgspec.ValidationError as error:
        raise AlgorithmError(f'options {objective.loss_options} of loss "{objective.loss}": {error}') from error
    return guided(distilled(made, objective.distillation), objective.hindsight)
