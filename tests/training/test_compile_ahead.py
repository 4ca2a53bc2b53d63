"""A compiled trainer knows every length of rows before its first batch."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from asyncrl.algorithms.rows import TrainRow
from asyncrl.training import attention
from asyncrl.training.attention import Documents
from asyncrl.training.init_model import ModelShape, create_model
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from topics.batches import Objective


@torch.library.custom_op("asyncrl_test::attend", mutates_args=())
def attend(query: torch.Tensor, bounds: torch.Tensor, longest: int) -> torch.Tensor:
    """One operation for all documents, as on a GPU; each token sees itself alone."""
    return query.squeeze(0).transpose(0, 1).clone(memory_format=torch.contiguous_format)


@attend.register_fake
def _shape(query: torch.Tensor, bounds: torch.Tensor, longest: int) -> torch.Tensor:
    return query.new_empty(query.shape[2], query.shape[1], query.shape[3])


attend.register_autograd(lambda _, grad: (grad.transpose(0, 1)[None], None, None))


def by_bounds(heads: tuple[torch.Tensor, ...], documents: Documents, **_: object) -> torch.Tensor:
    return attend(heads[0], documents.bounds, documents.longest)


def row(tokens: int) -> TrainRow:
    mask = np.ones(tokens, np.uint8)
    mask[0] = 0
    filled = np.full(tokens, 0.5, np.float32)
    return TrainRow("p1-0", np.full(tokens, 4, np.int32), mask, -filled, np.zeros(tokens, np.int32), filled, filled)


def test_a_new_length_compiles_nothing_after_a_trainer_has_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # kernels take minutes
    monkeypatch.setattr(attention, "_by_groups", by_bounds)
    torch._dynamo.reset()
    create_model(tmp_path / "model", alphabet="abcdefgh", seed=1, shape=ModelShape(hidden=32, layers=2, context=4096))
    settings = TorchSettings(compiled=True, micro_batch_tokens=8192, moments="bfloat16", threads=1)
    trainer = TorchTrainer(tmp_path / "model", settings)
    objective = Objective(learning_rate=1e-4)
    before = {name: one.clone() for name, one in trainer._own.parameters.items()}

    trainer.compile_for(objective)

    assert all(torch.equal(one, before[name]) for name, one in trainer._own.parameters.items())
    compiled = counters["stats"]["unique_graphs"]
    assert compiled
    for lengths in ([33] * 8, [40, 50, 60, 70], [101, 20], [301], [1023], [700, 20, 3], [2500, 2500], [2100] * 3):
        trainer.step([row(length) for length in lengths], objective)
        assert counters["stats"]["unique_graphs"] == compiled, lengths
