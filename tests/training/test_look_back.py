"""The teacher looks back, with real models: a frozen copy scores the ids of a reply behind a prompt with a hint."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.hindsight import HINDSIGHT
from asyncrl.algorithms.rows import TOP
from asyncrl.training.torch.trainer import TorchTrainer
from harness.training import copies, filled, policy_rows, prepared_by, save, sft, supervised_rows
from topics.batches import Hindsight, Objective

RULE = Hindsight()
RNG = np.random.default_rng(5)


def objective(rule: Hindsight = RULE, rate: float = 1e-3) -> Objective:
    return Objective(loss="decoupled", learning_rate=rate, hindsight=rule)


def live_rows(count: int, hints: int, estimator: str = "combine"):
    """Turns, of which each second has hints."""
    found = []
    for number, row in enumerate(policy_rows(np.random.default_rng(4), count)):
        prompts = [RNG.integers(3, 29, size).astype(np.int32) for size in range(4, 4 + hints)]
        hinted = prompts if number % 2 == 0 else []
        found.append(dataclasses.replace(row, estimator=estimator, hinted=hinted, advantages=row.advantages * 0 - 0.5))
    return found


def scored(model, prompt, reply, temperature):
    """Log-probs [R, V] behind a prompt, as transformers computes them."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def test_the_frozen_copy_scores_the_reply_behind_the_hint_at_the_temperature_of_the_turn(model):
    trainer = TorchTrainer(model)
    rows = live_rows(6, 1)

    found = {row.trajectory_id: row for row in trainer.with_advantages(rows, objective())}

    for row in rows:
        column, reply = found[row.trajectory_id].columns[HINDSIGHT], row.mask != 0
        expected = row.logprobs[reply]
        if row.hinted:
            every = scored(model, row.hinted[0], row.tokens[reply], row.temperature)
            expected = every.gather(-1, torch.tensor(row.tokens[reply])[:, None].long())[:, 0].numpy()
        assert column[reply] == pytest.approx(expected, abs=1e-4)
        difference = (expected - row.logprobs[reply]).clip(-1, 1)
        assert found[row.trajectory_id].advantages[reply] == pytest.approx(difference - 0.5, abs=1e-4)


def test_the_step_tells_how_far_live_turns_are_from_the_policy_of_before_the_first_step(model):
    trainer = TorchTrainer(model)
    rows = live_rows(4, 0, "none")
    live = [dataclasses.replace(row, trajectory_id=f"l00000{number}-0") for number, row in enumerate(rows[:2])]
    watched = Objective(loss="decoupled", learning_rate=1e-2, live_kl=True)

    first, second = (trainer.step([*live, *rows[2:]], watched)["live_reference_kl"] for _ in range(2))

    nats = []
    for row in live:
        reply = row.mask != 0
        every = scored(model, row.tokens[~reply], row.tokens[reply], row.temperature)
        other = every.gather(-1, torch.tensor(row.tokens[reply])[:, None].long())[:, 0].numpy()
        nats += [math.exp(gap) - 1 - gap for gap in other - row.logprobs[reply]]
    assert first == pytest.approx(np.mean(nats), rel=1e-3)
    assert second == first, "the reference stays, though the policy has moved"
    assert "live_reference_kl" not in trainer.step(rows, watched)


def test_of_several_hints_the_one_counts_whose_likeliest_tokens_are_the_policys(model):
    trainer = TorchTrainer(model)
    (row,) = live_rows(1, 1)
    reply = row.mask != 0
    own = row.tokens[~reply]
    far = [RNG.integers(3, 29, 12).astype(np.int32) for _ in range(2)]
    row = dataclasses.replace(row, hinted=[far[0], own, far[1]])  # behind its own prompt the teacher is the policy

    (found,) = trainer.with_advantages([row], objective())

    every = scored(model, own, row.tokens[reply], row.temperature)
    expected = every.gather(-1, torch.tensor(row.tokens[reply])[:, None].long())[:, 0].numpy()
    assert found.columns[HINDSIGHT][reply] == pytest.approx(expected, abs=1e-4)


def test_over_the_likeliest_tokens_ids_are_the_policys_and_differences_bounded(model):
    trainer = TorchTrainer(model)
    rows = live_rows(3, 1, "hindsight")
    rule = Hindsight(top_k=4, clip=0.05)

    used = prepared_by(trainer, rows, objective(rule))

    for row in used:
        reply = row.mask != 0
        top = row.columns[TOP][reply]
        if not row.hinted:
            assert not top.any()
            continue
        own = scored(model, row.tokens[~reply], row.tokens[reply], row.temperature)
        behind = scored(model, row.hinted[0], row.tokens[reply], row.temperature)
        ids = torch.tensor(top[..., 0]).long()
        assert torch.equal(ids, own.topk(4).indices)
        nats = (behind - own).gather(-1, ids).clamp(-0.05, 0.05).numpy()
        assert top[..., 1] == pytest.approx(nats, abs=1e-4)
    before = copies(trainer)
    trainer.step(rows, objective(rule))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in copies(trainer).items())


def test_a_step_moves_the_policy_to_what_the_hint_asks_for_and_its_teacher_stays(model, tmp_path):
    """The supervised model writes words backwards; behind the hint, a prompt of another word, it wants that word."""
    trainer = TorchTrainer(model)
    rng = np.random.default_rng(0)
    for _ in range(60):
        trainer.step(supervised_rows(rng, 64), sft())
    prompt, other = np.array([3, 4, 5, 29], np.int32), np.array([6, 7, 8, 29], np.int32)
    wanted = np.array([8, 7, 6, 2], np.int32)
    (start,) = policy_rows(rng, 1)
    size = len(prompt) + len(wanted)
    row = dataclasses.replace(
        filled(filled(start, "advantages", 0.0), "weights", 0.25),
        tokens=np.concatenate([prompt, wanted]),
        mask=np.repeat(np.array([0, 1], np.uint8), 4),
        versions=np.repeat(np.array([-1, 0], np.int32), 4),
        logprobs=np.repeat(np.array([0, -6], np.float32), 4),
        advantages=np.zeros(size, np.float32),
        weights=np.full(size, 0.25, np.float32),
        estimator="hindsight",
        temperature=1.0,
        hinted=[other],
    )

    plain = dataclasses.replace(row, estimator="none")
    nll = [trainer.step([plain], sft(0.0))["nll"]]
    first = trainer.with_advantages([row], objective())[0].columns[HINDSIGHT]
    gains = [trainer.step([row], objective())["hindsight_difference"] for _ in range(5)]
    last = trainer.with_advantages([row], objective())[0].columns[HINDSIGHT]

    nll.append(trainer.step([plain], sft(0.0))["nll"])
    assert nll[1] < nll[0]
    assert (first[4:] > -1.5).all() and gains[0] > 0.5
    assert np.array_equal(first, last), "the teacher is the policy of before the first step"
    save(trainer, tmp_path)
    again = TorchTrainer(model)
    again.load(tmp_path)
    assert np.array_equal(again.with_advantages([row], objective())[0].columns[HINDSIGHT], first)
