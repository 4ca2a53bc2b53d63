"""Distillation on the teacher's most probable tokens: a divergence over them and one outcome of all others.

At each position the teacher names its K most probable tokens, with log-probs. With P_b and Q_b the probabilities that
policy and teacher give to the K tokens and, b = K + 1, to all others together:

    reverse  KL(P || Q) = sum over b of P_b (log P_b - log Q_b)
    forward  KL(Q || P) = sum over b of Q_b (log Q_b - log P_b)
    both     half the sum of the two

Grouping outcomes never raises a KL, so each is a lower bound of that over the whole vocabulary, and equal to it where K
is the vocabulary. The gradient goes through all tokens, those of the last outcome as well.

Source: both directions on samples of the policy GKD, arXiv 2306.13649, section 3; all others as one outcome as in
OpenClaw-RL (reverse, K = 50).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from asyncrl.algorithms.named import named
from asyncrl.algorithms.rows import TOP
from asyncrl.algorithms.token_loss import Loss, Tokens
from topics.batches import Distillation

if TYPE_CHECKING:
    import torch

    from asyncrl.algorithms.token_loss import OfBatch, Sums

    Divergence: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_LEAST_REST = 1e-7
"""Probability that a teacher gives at least to all other tokens: 1 minus the sum of rounded numbers is no better."""


def reverse(policy: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(policy || teacher), [N], of log-probs of outcomes, [N, B] each."""
    return (policy.exp() * (policy - teacher)).sum(-1)


def forward(policy: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(teacher || policy), [N]; see `reverse`."""
    return reverse(teacher, policy)


def both(policy: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Half the sum of the two, [N]; see `reverse`."""
    return (reverse(policy, teacher) + reverse(teacher, policy)) / 2.0


DIRECTIONS: dict[str, Divergence] = {"reverse": reverse, "forward": forward, "both": both}
"""Divergences by their name in `learner.teacher.direction`."""


def with_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """Log-probs of K tokens [N, K], then of all others together: log(1 - their sum), [N, K + 1]."""
    import torch

    rest = 1.0 - logprobs.exp().sum(-1, keepdim=True)
    return torch.cat([logprobs, rest.clamp(min=_LEAST_REST).log()], -1)


class OverTop(Loss, frozen=True):
    """A loss with a term over several tokens of each place, which the column `teacher_top` has."""

    loss: Any  # the `Loss`
    rule: Any  # has `top_k`

    @property
    def needs(self) -> tuple[str, ...]:
        return (*self.loss.needs, TOP)

    @property
    def of_batch(self) -> dict[str, OfBatch]:
        found: dict[str, OfBatch] = self.loss.of_batch
        return found

    @property
    def uses_advantages(self) -> bool:
        """See `Loss`; a row may have the divergence and no reward."""
        return False

    @property
    def uses_entropy(self) -> bool:
        return bool(self.loss.uses_entropy)

    @property
    def top_k(self) -> int:
        return int(self.rule.top_k)


class Distilled(OverTop, frozen=True):
    """A loss plus coef * the divergence from the teacher at each token, for any advantage."""

    def __call__(self, logprobs: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, Sums]:
        policy, teacher = tokens.columns["outcomes"], tokens.columns[TOP][..., 1]
        if policy.shape[-1] > teacher.shape[-1]:
            teacher = with_rest(teacher)
        nats = named(DIRECTIONS, self.rule.direction, "direction")(policy, teacher)
        loss, sums = self.loss(logprobs, tokens)
        loss = loss + self.rule.coef * (tokens.weights.float() * nats).sum()
        return loss, {**sums, "teacher_kl": (nats.detach() * (tokens.weights > 0)).sum()}


def distilled(loss: Loss, rule: Distillation | None) -> Loss:
    """The loss of a step with a teacher; without one the loss itself.

    Raises:
        AlgorithmError: there is no such direction.
    """
    if rule is None:
        return loss
    named(DIRECTIONS, rule.direction, "direction")
    return Distilled(loss=loss, rule=rule)
