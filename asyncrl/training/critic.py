"""The critic of PPO: a second model with its own optimiser that learns the value of each state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from asyncrl.algorithms.rows import TrainRow
from asyncrl.algorithms.sums import Sums
from asyncrl.algorithms.value_loss import explained_variance, value_loss
from asyncrl.training.host_copy import Source
from asyncrl.training.model_optimizer import ModelOptimizer, Stems, Update
from asyncrl.training.passes import Passes
from asyncrl.training.policy import Loading, Policy, load_policy
from asyncrl.training.vocabulary import Top
from topics.batches import CriticStep

STEMS = Stems("critic", "moments_of_critic")
COLUMNS = "values", "returns"


class ValueModel(Policy):
    """The architecture of a policy with one number as its output, which is 0 at first."""

    def __init__(self, model: Any, *, compiled: bool = False, sparing: bool = False) -> None:
        super().__init__(model, compiled=compiled, sparing=sparing)
        head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
        nn.init.zeros_(head.weight)
        model.set_output_embeddings(head.to(model.device, model.dtype))

    def read(
        self, chosen: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, wanted: torch.Tensor | Top | None
    ) -> tuple[torch.Tensor, ...]:
        """Return the value, [N] float32, of the state before each scored token; twice, in place of an entropy."""
        values = self.model.get_output_embeddings()(chosen).float().squeeze(-1)
        return values, values.detach()


class Critic:
    """Fills the column `values`, and learns from the returns."""

    scorer: Any  # a `Scorer`
    _own: Any  # a `base_trainer.OptimizerState`

    def __init__(
        self, directory: Path, how: Loading, passes: Passes, *, eps: float, moments: torch.dtype = torch.float32
    ) -> None:
        """Load the model of a directory without its head."""
        self.scorer = load_policy(directory, how, ValueModel)
        self._passes = passes
        self._own = ModelOptimizer(self.scorer, directory, eps=eps, stems=STEMS, moments=moments)

    def gradient(self, rows: Sequence[TrainRow], step: CriticStep) -> tuple[float, dict[str, float]]:
        """Leave the gradient of the value loss in the parameters; returns its norm, and figures."""
        batches = self._passes.cut([_with_returns(row) for row in rows])
        found = self._passed(batches, step.value_clip)
        norm, sums = self._own.norm(), {name: float(value) for name, value in found.items()}
        if not sums.get("tokens"):
            return norm, {}
        figures = {name: sums[name] / sums["tokens"] for name in ("value_mean", "return_mean", "value_clip_fraction")}
        figures["explained_variance"] = explained_variance(sums)
        return norm, {"value_loss": sums["value_loss"], "value_grad_norm": norm, **figures}

    def _passed(self, batches: list[list[TrainRow]], clip: float) -> Sums:
        """Leave the gradient of micro-batches in the parameters; returns the sums of all ranks."""
        parts = []
        for batch in self.scorer.passes(self._passes.even(batches, COLUMNS)):
            laid = self._passes.lay(batch, COLUMNS)
            values, *_ = self.scorer(*laid.inputs)
            loss, found = value_loss(values, laid.tokens, clip=clip)
            torch.autograd.backward(loss * self._passes.processes)  # FSDP2 averages gradients over ranks
            parts.append({**found, "value_loss": loss.detach()})
        return self._passes.sums(parts)

    def update(self, step: CriticStep, norm: float) -> None:
        """Move the weights by the gradient."""
        self._own.update(Update(step.learning_rate, step.betas, step.weight_decay, step.max_grad_norm), norm)

    def forget(self) -> None:
        """Forget the gradient."""
        self._own.forget()

    def tensors(self) -> list[torch.Tensor]:
        """Weights and moments."""
        found: list[torch.Tensor] = self._own.tensors()
        return found

    def gradients(self) -> list[torch.Tensor]:
        """See `OptimizerState.gradients`."""
        found: list[torch.Tensor] = self._own.gradients()
        return found

    def sources(self) -> list[Source]:
        """Tensors for a checkpoint."""
        begun = torch.tensor(1)  # so that the file of the moments is there before the first update, too
        return [*self._own.sources(), Source(STEMS.state, "begun", begun, begun.dtype)]

    def load(self, directory: Path) -> None:
        """Continue from a checkpoint; without a critic in it a new one starts.

        Raises:
            OtherModel: its critic is another model.
        """
        if any(directory.glob(f"{STEMS.weights}*.safetensors")):
            self._own.load(directory)


def largest_return(row: TrainRow) -> float:
    """Largest absolute return of a row with values; infinite if one is not a number."""
    returns = np.abs(row.advantages + row.columns["values"])[row.mask != 0]
    return float(np.nan_to_num(returns, nan=np.inf, posinf=np.inf).max(initial=0.0))


def _with_returns(row: TrainRow) -> TrainRow:
    return replace(row, columns={**row.columns, "returns": row.advantages + row.columns["values"]})
