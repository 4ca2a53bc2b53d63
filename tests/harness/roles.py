"""A policy and a wider teacher, and what tests of further models in a trainer share."""

import numpy as np
import torch

from asyncrl.training.init_model import ModelShape
from asyncrl.training.lora import Lora
from harness.training import copies
from topics.batches import Objective, Penalty

ALPHABET = "abcdefghijklmnopqrstuvwxyz="
SHAPE = ModelShape(hidden=32, head_dim=16, ffn=64, context=32)
TO_REFERENCE, TO_TEACHER = Penalty("reference", 0.1), Penalty("teacher", 1.0, recomputed=True)
LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))


def with_penalties(*penalties, reference=0):
    return Objective(learning_rate=1e-2, penalties=list(penalties), reference=reference)


def scored(trainer, rows, column):
    """Log-probs of the trained tokens, one after the other."""
    return np.concatenate([row.columns[column][row.mask == 1] for row in trainer._filled(rows, [column])])


def assert_same_bits(first, second):
    for name, tensor in copies(first).items():
        assert torch.equal(tensor, copies(second)[name]), name
