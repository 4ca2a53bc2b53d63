"""Passes with a gradient: micro-batches go through the stages of a model one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from asyncrl.algorithms.rows import TOP, TrainRow, weightless
from asyncrl.algorithms.sums import Sums
from asyncrl.training.megatron.context import Share
from asyncrl.training.megatron.mtp_loss import AheadPass
from asyncrl.training.megatron.optimizer import MegatronOptimizer
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.megatron.policy import MegatronPolicy
from asyncrl.training.packing import MicroBatch
from asyncrl.training.passes import Passes

LossOf: TypeAlias = Callable[[MicroBatch, tuple[torch.Tensor, ...]], tuple[torch.Tensor, Sums]]
"""From a micro-batch, and what the model says of its tokens, to a loss and sums."""


class Schedule:
    """A model with its optimiser, over all stages."""

    def __init__(
        self,
        policy: MegatronPolicy,
        own: MegatronOptimizer,
        passes: Passes,
        layout: Layout,
        mtp_weight: float = 0.0,
    ) -> None:
        """
        Args:
            mtp_weight: of the loss of the layer that predicts the token after the next one, where the model has it.
        """
        self._policy, self._own, self._passes, self._layout = policy, own, passes, layout
        self._mtp_weight, self._counts = mtp_weight, own.corrections.moves

    def gradient(self, batches: list[list[TrainRow]], columns: Sequence[str], loss_of: LossOf) -> Sums:
        """Leave the gradient of micro-batches in the parameters; returns the sums of all ranks."""
        self._own.forget()
        rows = self._passes.even(batches, columns)
        if self._layout.virtual > 1:  # the stages alternate between chunks after as many micro-batches as stages
            rows = rows + [[weightless(columns)]] * (-len(rows) % self._layout.pipeline)
        found: list[Sums] = []
        if rows:
            ahead = AheadPass(self._policy, self._mtp_weight) if self._mtp_weight else None
            given = [(self._passes.lay(one, columns) for one in rows) for _ in self._own.replicated]
            found = get_forward_backward_func()(
                forward_step_func=partial(self._forward, loss_of, ahead),
                data_iterator=given if len(given) > 1 else given[0],
                model=self._own.replicated,
                num_microbatches=len(rows),
                seq_length=1,  # each has its own
                micro_batch_size=1,
                forward_only=False,
            )
        return self._of_last_stage(self._passes.sums(found))

    def _forward(
        self, loss_of: LossOf, ahead: AheadPass | None, batches: Iterator[MicroBatch], model: Any
    ) -> tuple[torch.Tensor, Any]:
        """Pass a micro-batch through a chunk; returns its hidden states, and what makes a loss of the last ones."""
        batch = next(batches)
        share = self._policy.share(batch.inputs)
        if self._counts:
            self._policy.count(share, batch.tokens.weights)
        return self._policy.hidden(model, share), partial(self._loss, loss_of, ahead, batch, share)

    def _loss(
        self, loss_of: LossOf, ahead: AheadPass | None, batch: MicroBatch, share: Share, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Sums]:
        """Return loss, a number of tokens by which nothing is divided, and sums."""
        ids = batch.tokens.columns[TOP][..., 0].long() if TOP in batch.tokens.columns else None
        total, sums = loss_of(batch, self._policy.scored(hidden, share, ids))
        if ahead is not None:
            further, nats = ahead.loss(batch, hidden, counts=self._counts)
            total, sums = total + further, {**sums, "mtp_loss": nats}
        return total, torch.tensor(0, dtype=torch.int, device=hidden.device), sums

    def _of_last_stage(self, sums: Sums) -> Sums:
        """Give the sums, which the last stage has, to the ranks of all stages."""
        if self._layout.pipeline == 1:
            return sums
        # As numbers: a tensor that is pickled names the GPU of its process, which is another one elsewhere.
        held = [{name: float(value) for name, value in sums.items()}]
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast_object_list(held, parallel_state.get_pipeline_model_parallel_last_rank(), group)
        device = self._policy.device
        return {name: torch.tensor(value, dtype=torch.float32, device=device) for name, value in held[0].items()}
