"""The loss of the layer that predicts the token after the next one, with which engines draft tokens.

It trains together with the policy, from hidden states, embeddings and a head that its gradient does not reach. The
library's own lets the gradient into the trunk and holds the logits of all tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from asyncrl.training.megatron.policy import MegatronPolicy
from asyncrl.training.packing import Inputs, MicroBatch


class AheadPass:
    """The loss of the layer over the micro-batches of a step."""

    def __init__(self, policy: MegatronPolicy, weight: float) -> None:
        """Every rank takes part: the last stage gets the embedding of the first one for the step.

        Args:
            weight: of the loss.
        """
        self._policy, self._weight = policy, weight
        chunk = policy.chunks[0]
        held = chunk.embedding.word_embeddings.weight.detach() if chunk.pre_process else None
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        if stages > 1 and parallel_state.is_rank_in_embedding_group():
            group = parallel_state.get_embedding_group()
            if held is None:
                held = torch.empty_like(policy.head_weight())
            dist.broadcast(held, dist.get_global_rank(group, 0), group)
        self._embedding = held

    def loss(self, batch: MicroBatch, hidden: torch.Tensor, *, counts: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of a micro-batch, and the sum of what the tokens were not expected by, in nats.

        Args:
            hidden: [T of this rank, 1, H] of the last stage.
            counts: whether the tokens of its experts are counted.
        """
        policy, model = self._policy, self._policy.chunks[-1]
        inputs, there = further(batch.inputs)
        share, weights = policy.share(inputs), batch.tokens.weights * there
        if counts:
            policy.count(share, weights)
        angles = model.angles(share.packed.positions)
        made = model.ahead(self._embedded(share.tokens), hidden.detach(), share.packed, angles)
        logprobs, _ = policy.scored(made, share, learns=False)
        nats = -(logprobs.detach() * (weights > 0)).sum()
        return -self._weight * (weights * logprobs).sum(), nats

    @torch.no_grad()
    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of the tokens of this rank, [T / tensor, 1, H], from those of all, [1, T]."""
        assert self._embedding is not None
        group, rows = parallel_state.get_tensor_model_parallel_group(), len(self._embedding)
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        own = tokens[0] - rank * rows
        inside = (own >= 0) & (own < rows)
        found: torch.Tensor = self._embedding[own.clamp(0, rows - 1)] * inside[:, None]
        if ranks > 1:
            dist.all_reduce(found, group=group)
        return found.chunk(ranks)[rank].unsqueeze(1)


def further(inputs: Inputs) -> tuple[Inputs, torch.Tensor]:
    """Return a micro-batch one token further: each place has the token after it, and targets are scored one earlier.

    The first scored token of a document that begins with it has no such place; it stays, and is said not to be there.

    Returns:
        The inputs, without recorded experts; and [N] whether there is a place for each target.
    """
    documents = inputs.documents
    assert documents is not None  # rows are packed
    tokens = torch.nn.functional.pad(inputs.tokens[:, 1:], (0, 1))
    there = documents.positions[0][inputs.positions] > 0
    return (
        inputs._replace(
            tokens=tokens, positions=inputs.positions - there.long(), documents=documents._replace(routing=None)
        ),
        there,
    )
