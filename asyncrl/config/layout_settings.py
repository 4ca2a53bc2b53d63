"""The division of a model over the ranks of the learner: the table `[learner.layout]`."""

from __future__ import annotations

from asyncrl.config.setting_types import Positive, Settings


class LayoutSettings(Settings):
    """The division of the model over the ranks of the trainer `megatron`; ranks beyond one model hold its replicas."""

    # Ranks that share each matrix product, and the tokens between products; a divisor of the key-value heads.
    tensor: Positive = 1
    pipeline: Positive = 1  # Stages of consecutive layers; a divisor of the layers.
    # Ranks that share the tokens of each document, cut into twice as many chunks. A micro-batch is divided over them.
    context: Positive = 1
    # Chunks of consecutive layers in each stage: micro-batches meet shorter stages, and wait less for one another.
    virtual: Positive = 1
    # Ranks of a stage, of one replica or of several, that share the experts; a divisor of the experts.
    expert: Positive = 1
