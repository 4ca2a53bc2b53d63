"""A critic in the trainer: what it learns, what the policy gets from it, and that a restart gives the same bits."""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.gae import gae
from asyncrl.training.checkpoint import OtherModel
from asyncrl.training.critic import ValueModel
from asyncrl.training.protocol import NonFiniteLoss
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from harness.roles import TO_REFERENCE, assert_same_bits, scored
from harness.training import copies, policy_rows, save
from topics.batches import CriticStep, Objective


def with_critic(models):
    return TorchTrainer(models / "policy", TorchSettings(critic=models / "teacher"))


def ppo(*, rate=1e-2, alone=False, penalties=(), gae_lambda=0.9):
    step = CriticStep(learning_rate=1e-2, gae_lambda=gae_lambda, value_clip=0.0, alone=alone)
    return Objective(loss="ppo", learning_rate=rate, critic=step, penalties=list(penalties))


def rewarded_rows(seed, count=24):
    """Rows with the reward 1 where the first sampled token is of the first half of the alphabet, else 0."""
    rows = policy_rows(np.random.default_rng(seed), count)
    rewards = [float(row.tokens[3] < 16) for row in rows]
    return [
        dataclasses.replace(row, advantages=np.full(len(row.tokens), reward, np.float32), estimator="gae")
        for row, reward in zip(rows, rewards, strict=True)
    ]


def test_a_critic_alone_learns_values_and_leaves_the_policy(models):
    trainer, untouched = with_critic(models), TorchTrainer(models / "policy")
    rows = rewarded_rows(1)

    found = [trainer.step(rows, ppo(alone=True, gae_lambda=1.0)) for _ in range(25)]

    assert_same_bits(untouched, trainer)
    assert found[0]["value_mean"] == 0.0  # its head begins at zero
    assert found[-1]["value_loss"] < found[0]["value_loss"] / 2
    assert found[-1]["explained_variance"] > 0.5 > found[0]["explained_variance"]
    assert {"loss", "rows"} <= found[0].keys()
    assert "grad_norm" not in found[0]


def test_the_head_of_a_critic_lies_where_its_model_does(models):
    model = AutoModelForCausalLM.from_pretrained(models / "teacher", dtype=torch.bfloat16).to("meta")

    head = ValueModel(model).model.get_output_embeddings().weight

    assert (head.device, head.dtype) == (torch.device("meta"), torch.bfloat16)


def test_advantages_and_returns_of_ppo_are_those_of_the_critic_before_the_update(models):
    trainer, rows = with_critic(models), rewarded_rows(1)
    for _ in range(3):
        trainer.step(rows, ppo(penalties=[TO_REFERENCE]))
    objective = ppo(penalties=[TO_REFERENCE])
    made = trainer.with_advantages(rows, objective)

    for row, was in zip(made, rows, strict=True):
        trained = row.mask == 1
        rewards = row.columns["penalty"][trained].astype(np.float64)
        rewards[-1] += was.advantages[-1]
        expected = gae(rewards, row.columns["values"][trained].astype(np.float64), discount=1.0, decay=0.9)
        assert np.allclose(row.advantages[trained], expected, atol=1e-6)
        assert row.columns["values"][trained].any()
    norm, _ = trainer._critic.gradient(made, objective.critic)
    total = sum(
        0.5 * float((row.weights * row.advantages**2)[row.mask == 1].sum()) for row in made
    )  # R - V = A where V is that before the update
    assert trainer.step(rows, objective)["value_loss"] == pytest.approx(total, rel=1e-4)
    assert norm > 0


def test_whitened_advantages_are_the_policys_and_leave_the_returns(models):
    rows, objective = rewarded_rows(1), ppo(penalties=[TO_REFERENCE])
    plain, white = with_critic(models), with_critic(models)

    found = plain.step(rows, objective), white.step(rows, msgspec.structs.replace(objective, whiten=True))

    returns = [{key: one[key] for key in ("value_loss", "return_mean", "value_grad_norm")} for one in found]
    assert returns[0] == returns[1]
    assert found[0]["grad_norm"] != found[1]["grad_norm"]


def test_ppo_raises_what_is_rewarded(models):
    trainer, rows = with_critic(models), rewarded_rows(1, 48)

    for _ in range(4):
        trainer.step(rows, ppo(alone=True))
    before = scored(trainer, rows, "proximal")
    for _ in range(6):
        trainer.step(rows, ppo(rate=3e-3))
    rise = scored(trainer, rows, "proximal") - before

    first = np.cumsum([0, *(int(row.mask.sum()) for row in rows[:-1])])
    good = np.array([row.advantages[0] for row in rows]) > 0
    assert rise[first][good].mean() > rise[first][~good].mean()


def test_ppo_resumes_bit_equal(models, tmp_path):
    batches, objectives = [rewarded_rows(seed, 12) for seed in range(4)], [ppo(alone=step < 1) for step in range(4)]
    whole, first, second = (with_critic(models) for _ in range(3))
    for rows, objective in zip(batches, objectives, strict=True):
        figures = whole.step(rows, objective)
    for rows, objective in zip(batches[:2], objectives[:2], strict=True):
        first.step(rows, objective)
    save(first, tmp_path)
    second.load(tmp_path)
    for rows, objective in zip(batches[2:], objectives[2:], strict=True):
        again = second.step(rows, objective)

    assert figures == again
    assert_same_bits(whole, second)
    other = TorchTrainer(models / "policy", TorchSettings(critic=models / "policy"))
    with pytest.raises(OtherModel, match=r"lm_head.weight has shape \(1, 48\), the model in .* has \(1, 32\)"):
        other.load(tmp_path)


def test_a_checkpoint_from_before_the_first_update_of_the_critic_is_whole(models, tmp_path):
    first, second = with_critic(models), with_critic(models)
    first.step(rewarded_rows(1, 6), Objective(loss="sft", learning_rate=1e-2))
    save(first, tmp_path)

    second.load(tmp_path)

    assert first.step(rewarded_rows(2, 12), ppo()) == second.step(rewarded_rows(2, 12), ppo())
    assert_same_bits(first, second)


def test_a_critic_that_is_no_number_leaves_both_models(models):
    trainer, rows = with_critic(models), rewarded_rows(1, 6)
    broken = [dataclasses.replace(rows[0], advantages=np.full_like(rows[0].advantages, np.inf)), *rows[1:]]
    before = copies(trainer)

    named = (
        rf"critic: gradient norm .*; the largest return is of trajectory {rows[0].trajectory_id}; the weights were not"
    )
    with pytest.raises(NonFiniteLoss, match=named):
        trainer.step(broken, ppo())

    for name, tensor in copies(trainer).items():
        assert torch.equal(tensor, before[name])
    assert trainer.step(rows, ppo())["value_mean"] == 0.0
