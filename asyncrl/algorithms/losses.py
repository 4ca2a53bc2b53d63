"""All losses by their name in `learner.loss`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from asyncrl.algorithms.named import AlgorithmError, named
from asyncrl.algorithms.policy_loss import Decoupled, Ppo
from asyncrl.algorithms.token_loss import Loss, Tokens

if TYPE_CHECKING:
    import torch

    from asyncrl.algorithms.token_loss import Sums
    from topics.batches import Objective


class Sft(Loss, frozen=True):
    """Weighted negative log-likelihood, whatever the reward. The warm-up's loss."""

    uses_advantages: ClassVar[bool] = False

    def __call__(self, logprobs: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, Sums]:
        """See `Loss`."""
        logprobs, trained = logprobs.float(), tokens.weights > 0
        sums = {"tokens": trained.sum(), "nll": -(logprobs.detach() * trained).sum()}
        return -(tokens.weights * logprobs).sum(), sums


LOSSES: dict[str, type[Loss]] = {"decoupled": Decoupled, "ppo": Ppo, "sft": Sft}


def loss_of(objective: Objective) -> Loss:
    """The loss that an objective names, with its options.

    Raises:
        AlgorithmError: there is no such loss, or it has no such options.
    """
    loss = named(LOSSES, objective.loss, "loss")
    try:
        return msgspec.convert(objective.loss_options, loss)
    except msgspec.ValidationError as error:
        raise AlgorithmError(f'options {objective.loss_options} of loss "{objective.loss}": {error}') from error
