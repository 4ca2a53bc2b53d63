"""ECHO: the cross-entropy of tokens that the policy did not sample, after the first one that it did."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.losses import loss_of
from asyncrl.algorithms.observations import with_observations
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from harness.training import policy_rows
from topics.batches import Objective

COEFFICIENT = 0.3


def rows_with_observations():
    """Rows of at least nine tokens whose tokens 5 and 6 are the answer of a tool."""
    rows = [row for row in policy_rows(np.random.default_rng(3), 12) if len(row.tokens) > 8]
    found = []
    for row in rows:
        of_tool = np.isin(np.arange(len(row.tokens)), (5, 6))
        changed = {"mask": 0, "logprobs": 0.0, "versions": -1}
        arrays = {name: np.where(of_tool, value, getattr(row, name)) for name, value in changed.items()}
        found.append(dataclasses.replace(row, **{k: v.astype(getattr(row, k).dtype) for k, v in arrays.items()}))
    return found


def gradient_of_observations(model, rows):
    """Row by row through the model's own forward pass."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for row in rows:
        tokens = torch.from_numpy(row.tokens).long()
        logprobs = (network(input_ids=tokens[None]).logits[0, :-1] / row.temperature).log_softmax(-1)
        (-COEFFICIENT * row.weights[0] * sum(logprobs[place - 1, tokens[place]] for place in (5, 6))).backward()
    return {name: parameter.grad for name, parameter in network.named_parameters()}


def gradient(trainer, rows, objective):
    trainer._gradient([[row] for row in rows], loss_of(objective))
    return {name: parameter.grad.clone() for name, parameter in trainer._policy.model.named_parameters()}


def test_the_cross_entropy_of_observations_is_added_to_the_policy_loss(model):
    rows, trainer = rows_with_observations(), TorchTrainer(model)
    plain = gradient(trainer, rows, Objective(loss="reinforce"))
    trainer._own.forget()
    echo = Objective(loss="reinforce", loss_options={"observations": COEFFICIENT})

    found = gradient(trainer, with_observations(rows), echo)

    for name, expected in gradient_of_observations(model, rows).items():
        assert torch.allclose(found[name] - plain[name], expected, rtol=1e-3, atol=1e-6), name


def test_observations_change_neither_the_figures_of_the_policy_nor_other_rows(model):
    rows = rows_with_observations()
    plain, echo = (
        TorchTrainer(model, TorchSettings(micro_batch_tokens=32)).step(
            rows, Objective(loss="reinforce", whiten=True, loss_options={"observations": coefficient})
        )
        for coefficient in (0.0, COEFFICIENT)
    )

    figures = plain.keys() - {"loss", "grad_norm", "rows_skipped"}
    assert {name: echo[name] for name in figures} == pytest.approx({name: plain[name] for name in figures}, rel=1e-3)
    assert echo["loss"] > plain["loss"]


def test_prompts_stale_tokens_and_rows_without_observations_keep_their_masks():
    row = rows_with_observations()[0]
    stale = dataclasses.replace(row, mask=np.where(np.arange(len(row.tokens)) == 4, 0, row.mask).astype(np.uint8))

    (found,) = with_observations([stale])

    assert found.mask[:5].tolist() == [0, 0, 0, 1, 0]
    assert np.flatnonzero(found.columns["observed"]).tolist() == [5, 6]
    assert found.weights[[5, 6]].tolist() == [0.0, 0.0]
