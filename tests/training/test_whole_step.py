"""From graded groups to the gradient of a step, against a loop over their tokens and the model of transformers."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.advantages import group_advantages
from asyncrl.algorithms.batches import GradedGroup, GradedTrajectory, build_rows
from asyncrl.algorithms.losses import loss_of
from asyncrl.training.init_model import ModelShape, create_model
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from topics.batches import Objective
from topics.trajectories import Segment

STEP, MIN_VERSION, CONSTANT = 6, 2, 17
ESTIMATORS = ["grpo", "centered", "rloo", "none", "reinforce_pp"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    shape = ModelShape(hidden=32, head_dim=16, ffn=64, context=32)
    create_model(directory, alphabet="abcdefghijklmnopqrstuvwxyz=", seed=0, shape=shape)
    return directory


def segment(rng):
    """A segment of 1 to 19 tokens: some trained, of those some stale, perhaps the first one, perhaps none."""
    size = int(rng.integers(1, 20))
    mask = (rng.random(size) < 0.5).astype(np.uint8)
    versions = np.where(mask, rng.integers(0, STEP, size), -1).astype(np.int32)
    logprobs = np.where(mask, rng.uniform(-4.5, -2.0, size), 0.0).astype(np.float32)
    return Segment(rng.integers(3, 29, size).astype(np.int32), mask, logprobs, versions)


def groups_of(rng):
    """Groups of one to four members, each of one or two segments, with estimators and temperatures of their own."""
    for group in range(6):
        members = [
            GradedTrajectory(f"p{group}-{member}", [segment(rng) for _ in range(rng.integers(1, 3))], float(reward))
            for member, reward in enumerate(rng.integers(0, 3, rng.integers(1, 5)))
        ]
        yield GradedGroup(members, str(rng.choice(ESTIMATORS)), float(rng.choice([1.0, 0.7])))


def trained(member):
    return sum(int(np.count_nonzero(one.mask[1:])) for one in member.segments)


def loss_by_hand(policy, groups, aggregation):
    """PPO, token by token; denominators count stale tokens, and no first token of a segment."""
    advantages = group_advantages(
        [[member.reward for member in group.members] for group in groups], [group.estimator for group in groups]
    )
    members = [member for group in groups for member in group.members]
    total = torch.zeros(())
    for group, of_group in zip(groups, advantages, strict=True):
        for member, advantage in zip(group.members, of_group.tolist(), strict=True):
            divisor = {
                "token": sum(map(trained, members)),
                "trajectory": len(members) * trained(member),
                "group": len(groups) * sum(map(trained, group.members)),
                "constant": len(members) * CONSTANT,
            }[aggregation]
            for one in member.segments:
                logits = policy(torch.tensor(one.tokens[None].astype(np.int64))).logits[0]
                logprobs = (logits / group.temperature).log_softmax(-1)
                for place in range(1, len(one.tokens)):
                    if one.mask[place] and one.versions[place] >= MIN_VERSION:
                        ratio = (logprobs[place - 1, int(one.tokens[place])] - float(one.logprobs[place])).exp()
                        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                        total = total - gain / divisor
    return total


@pytest.mark.parametrize(("seed", "aggregation"), enumerate(["token", "trajectory", "group", "constant"]))
def test_a_step_has_the_gradient_of_a_loop_over_its_tokens(model, seed, aggregation):
    groups = list(groups_of(np.random.default_rng(seed)))
    objective = Objective(loss="ppo", aggregation=aggregation, constant_tokens=CONSTANT)
    trainer = TorchTrainer(model, TorchSettings(micro_batch_tokens=40))
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    rows, _ = build_rows(groups, objective, step=STEP, min_version=MIN_VERSION)
    used = trainer.with_gradient(trainer.with_advantages(rows, objective), loss_of(objective))
    sums, norm = trainer._gradient(trainer._passes.cut(used), loss_of(objective))
    expected = loss_by_hand(policy, groups, aggregation)
    expected.backward()

    assert len(used) < len(rows)  # without trained tokens, or without advantage
    assert float(sums["loss"]) == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
    found = {name: parameter.grad for name, parameter in trainer._policy.model.named_parameters()}
    apart = torch.nn.utils.get_total_norm([found[name] - one.grad for name, one in policy.named_parameters()])
    assert norm > 1e-3
    assert apart / norm < 1e-6
