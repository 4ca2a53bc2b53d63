import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.algorithms.advantages import ADVANTAGES, Estimator
from asyncrl.algorithms.losses import LOSSES, loss_of
from asyncrl.algorithms.token_loss import Loss
from asyncrl.data.model_dir import check_model_directory
from asyncrl.training.activation_offload import activations_on_host
from asyncrl.training.checkpoint import OtherModel
from asyncrl.training.init_model import create_model
from asyncrl.training.protocol import NonFiniteLoss, RowError
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from asyncrl.weights.folders import DiskFolder
from asyncrl.weights.model_folder import write_model
from harness.roles import ALPHABET, SHAPE
from harness.training import (
    copies,
    filled,
    host_tensor,
    policy,
    policy_rows,
    prepared_by,
    save,
    sft,
    supervised_rows,
)
from topics.batches import Objective


def assert_same_bits(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_supervised_training_learns_to_reverse(trainer):
    rng = np.random.default_rng(0)
    losses = [trainer.step(supervised_rows(rng, 64), sft())["nll"] for step in range(1, 61)]

    assert losses[0] == pytest.approx(np.log(30), abs=0.2)
    assert losses[-1] < losses[0] / 2


def test_good_rows_become_likelier_and_bad_ones_less_likely(trainer):
    good, bad = policy_rows(np.random.default_rng(1), 3)[1:]
    rows = [filled(good, "advantages", 1.0), filled(bad, "advantages", -1.0)]

    before = [trainer.step([row], sft(0.0))["nll"] for row in rows]
    for _ in range(5):
        trainer.step(rows, policy())
    after = [trainer.step([row], sft(0.0))["nll"] for row in rows]

    assert after[0] < before[0]
    assert after[1] > before[1]


def test_the_same_rows_give_the_same_bits(model):
    runs = []
    for _ in range(2):
        trainer, rng = TorchTrainer(model), np.random.default_rng(1)
        found = [trainer.step(policy_rows(rng, 24), policy()) for step in range(1, 4)]
        runs.append((found, copies(trainer)))

    assert runs[0][0] == runs[1][0]
    assert_same_bits(runs[0][1], runs[1][1])


def reference_gradient(model, rows):
    """GRPO at ratio 1, row by row through the model's own forward pass; weights clamped at 2."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total = torch.zeros(())
    for row in rows:
        tokens = torch.from_numpy(row.tokens).long()
        logits = network(input_ids=tokens[None]).logits[0, :-1] / row.temperature
        logprobs = logits.log_softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]]
        importance = (logprobs.detach() - torch.from_numpy(row.logprobs)[1:]).exp().clamp(max=2.0)
        mask = torch.from_numpy(row.mask)[1:]
        total = total - (mask * row.weights[0] * row.advantages[0] * importance * logprobs).sum()
    total.backward()
    return {name: parameter.grad for name, parameter in network.named_parameters()}


def gradient(trainer, rows, objective):
    trainer._gradient([[row] for row in rows], loss_of(objective))
    return {name: parameter.grad for name, parameter in trainer._policy.model.named_parameters()}


def test_the_gradient_of_the_entropy_is_that_of_the_whole_distribution(model, trainer):
    rows = [filled(row, "advantages", 0.0) for row in policy_rows(np.random.default_rng(2), 6)]
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for row in rows:
        logits = network(input_ids=torch.from_numpy(row.tokens).long()[None]).logits[0, :-1] / row.temperature
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        (-0.1 * row.weights[0] * (torch.from_numpy(row.mask)[1:] * entropy).sum()).backward()

    objective = Objective(loss="ppo", loss_options={"entropy": 0.1})
    found = gradient(trainer, rows, objective)

    for name, parameter in network.named_parameters():
        assert torch.allclose(found[name], parameter.grad, rtol=1e-3, atol=1e-7), name
    assert trainer.step(rows, objective)["rows_skipped"] == 0
    assert trainer.step(rows, Objective(loss="ppo"))["rows_skipped"] == 6


@pytest.mark.parametrize("micro_batch_tokens", [1, 64, 4096])
def test_the_gradient_does_not_depend_on_micro_batches_or_skipped_rows(model, micro_batch_tokens):
    rows = policy_rows(np.random.default_rng(2), 24)
    expected = reference_gradient(model, rows)
    norm = float(torch.nn.utils.get_total_norm(expected.values()))
    trainer = TorchTrainer(model, TorchSettings(micro_batch_tokens=micro_batch_tokens))

    found = trainer.step(rows, policy(0.0))

    assert found["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert found["rows_skipped"] == 8
    for name, value in gradient(trainer, rows, policy()).items():
        assert torch.allclose(value, expected[name], rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_has_one_gradient_at_any_order_and_packing(model, loss):
    rows, norms = policy_rows(np.random.default_rng(2), 12), []
    for given, micro_batch_tokens in ((rows, 1), (rows[::-1], 64), (rows, 4096)):
        trainer = TorchTrainer(model, TorchSettings(micro_batch_tokens=micro_batch_tokens))
        norms.append(trainer.step(given, Objective(loss=loss))["grad_norm"])

    assert norms[0] > 0
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


def test_columns_are_filled_by_the_weights_before_the_update(model):
    rows = policy_rows(np.random.default_rng(2), 24)
    recomputed = Objective(loss_options={"proximal": "recomputed"}, learning_rate=1e-3)
    in_the_pass, before_it = (TorchTrainer(model, TorchSettings(micro_batch_tokens=64)) for _ in range(2))
    for _ in range(2):
        assert in_the_pass.step(rows, policy()) == before_it.step(rows, recomputed)
    assert_same_bits(copies(in_the_pass), copies(before_it))

    prepared = prepared_by(before_it, rows, recomputed)
    assert [row.trajectory_id for row in prepared] == [row.trajectory_id for row in rows if row.advantages.any()]
    nll = before_it.step(rows, Objective(loss="sft"))["nll"]
    every = before_it._filled(rows, ["proximal"])
    assert -np.concatenate([row.columns["proximal"][row.mask == 1] for row in every]).mean() == pytest.approx(nll)
    assert not any(row.columns["proximal"][row.mask == 0].any() for row in every)


class Distillation(Loss, frozen=True):
    """Sampled reverse KL to a teacher, whose log-probs come with the rows."""

    uses_advantages = False
    needs = ("teacher",)

    def __call__(self, logprobs, tokens):
        reward = (tokens.columns["teacher"] - logprobs).detach()
        return -(tokens.weights * reward * logprobs).sum(), {"tokens": (tokens.weights > 0).sum()}


def test_a_loss_of_ones_own_reads_columns_of_the_rows_or_of_another_scorer(model, trainer, monkeypatch):
    monkeypatch.setitem(LOSSES, "distillation", Distillation)
    objective, rows = Objective(loss="distillation"), policy_rows(np.random.default_rng(2), 6)

    with pytest.raises(
        RowError, match=r'p0: the objective needs the column "teacher", .* fills only proximal, reference'
    ):
        trainer.step(rows, objective)
    given = [dataclasses.replace(row, columns={"teacher": np.full(len(row.tokens), -1.0, np.float32)}) for row in rows]
    assert trainer.step(given, objective)["grad_norm"] > 0
    trainer.scorers["teacher"] = trainer._policy
    assert trainer.step(rows, objective)["grad_norm"] == 0  # a model is no distance from itself


def test_an_advantage_of_tokens_is_made_of_columns(trainer, monkeypatch):
    def of_row(row, _objective):
        return row.advantages - row.columns["proximal"]

    monkeypatch.setitem(ADVANTAGES, "of tokens", Estimator(list, of_row=of_row, needs=("proximal",)))
    rows = policy_rows(np.random.default_rng(2), 6)
    rows[:4] = [dataclasses.replace(row, estimator="of tokens") for row in rows[:4]]

    made = prepared_by(trainer, rows, policy())

    assert [row.trajectory_id for row in made] == ["p0", "p1", "p2", "p3", "p4", "p5"]
    assert made[4:] == rows[4:]
    for row, was in zip(made[:4], rows[:4], strict=True):  # p0 and p3, whose rewards gave no advantage, have one now
        assert np.array_equal(row.advantages, was.advantages - row.columns["proximal"])


def test_a_step_without_gradient_still_moves_by_momentum(trainer):
    rows = policy_rows(np.random.default_rng(2), 6)
    trainer.step(rows, policy())
    before = copies(trainer)

    found = trainer.step([rows[0], rows[3]], policy())

    assert (found["loss"], found["grad_norm"], found["rows_skipped"]) == (0.0, 0.0, 2)
    assert any(not torch.equal(before[name], tensor) for name, tensor in copies(trainer).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_resumes_bit_equal(model, tmp_path, dtype):
    rng = np.random.default_rng(3)
    batches = [policy_rows(rng, 12) for _ in range(4)]
    whole, first, second = (TorchTrainer(model, TorchSettings(dtype=dtype)) for _ in range(3))
    for rows in batches:
        whole.step(rows, policy())
    for rows in batches[:2]:
        first.step(rows, policy())
    save(first, tmp_path)
    random = torch.get_rng_state()
    torch.rand(3)
    second.load(tmp_path)

    assert torch.equal(torch.get_rng_state(), random)
    for rows in batches[2:]:
        second.step(rows, policy())
    assert_same_bits(copies(whole), copies(second))
    found, expected = (
        {one.name: host_tensor(one) for tensors in trainer.copy_state().files().values() for one in tensors}
        for trainer in (second, whole)
    )
    assert_same_bits(expected, found)


def test_a_checkpoint_of_another_model_is_refused(trainer, tmp_path):
    create_model(tmp_path / "other", alphabet=ALPHABET + "+", seed=0, shape=SHAPE)
    (tmp_path / "saved").mkdir()
    save(TorchTrainer(tmp_path / "other"), tmp_path / "saved")
    with pytest.raises(OtherModel, match=r"lm_head.weight has shape \(31, 32\).*has \(30, 32\)"):
        trainer.load(tmp_path / "saved")


@pytest.mark.parametrize("broken", [("advantages", float("nan")), ("weights", float("inf"))])
def test_a_loss_that_is_no_number_names_its_trajectory_and_leaves_the_weights(model, broken):
    trainer, untouched = TorchTrainer(model), TorchTrainer(model)
    rows = policy_rows(np.random.default_rng(4), 8)
    for one in (trainer, untouched):
        one.step(rows, policy())
    before = copies(trainer)

    with pytest.raises(NonFiniteLoss, match=r"loss .* 1 of 5 rows tried alone, of trajectories p4;"):
        trainer.step([*rows[:4], filled(rows[4], *broken), *rows[5:]], policy())

    assert_same_bits(before, copies(trainer))
    for one in (trainer, untouched):
        one.step(rows, policy())
    assert_same_bits(copies(untouched), copies(trainer))


def test_rows_without_a_trained_token_change_nothing(model):
    rows = policy_rows(np.random.default_rng(4), 8)
    nothing = [
        dataclasses.replace(row, mask=np.zeros_like(row.mask)) for row in policy_rows(np.random.default_rng(5), 3)
    ]
    plain, beside = TorchTrainer(model), TorchTrainer(model)

    expected, found = plain.step(rows, policy()), beside.step([*rows, *nothing], policy())

    assert found == {**expected, "rows": 11.0, "rows_skipped": expected["rows_skipped"] + 3}
    assert_same_bits(copies(plain), copies(beside))
    before = copies(TorchTrainer(model))
    trainer = TorchTrainer(model)
    assert trainer.step(nothing, policy())["grad_norm"] == 0.0  # a whole batch of them: a step like every other
    assert_same_bits(before, copies(trainer))


def test_a_row_the_model_cannot_read_is_refused(trainer):
    row = policy_rows(np.random.default_rng(5), 2)[1]
    with pytest.raises(RowError, match=r"p1: 33 tokens, the model's context is 32; set engine.context = 32"):
        trainer.step([dataclasses.replace(row, tokens=np.zeros(33, np.int32))], policy())
    with pytest.raises(RowError, match="p1: tokens 3 to 30, the model has 30"):
        trainer.step([dataclasses.replace(row, tokens=np.array([3, 30], np.int32))], policy())
    with pytest.raises(RowError, match="p1: sampled at temperature 0"):
        trainer.step([dataclasses.replace(row, temperature=0.0)], policy())


def test_an_exported_directory_is_a_model(model, tmp_path):
    trainer = TorchTrainer(model)
    trainer.step(policy_rows(np.random.default_rng(6), 6), policy())
    (tmp_path / "out").mkdir()
    write_model(DiskFolder(tmp_path / "out"), trainer.copy_weights().files(), trainer.source)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same_bits(copies(trainer), loaded.state_dict())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([3, 4, 29]) == "ab="
    assert check_model_directory(tmp_path / "out") == ("Qwen3ForCausalLM", 30, 32, 0, 2, 0)


def test_bfloat16_publishes_rounded_weights_of_float32_masters(model, trainer):
    rows = policy_rows(np.random.default_rng(7), 9)
    rounded = TorchTrainer(model, TorchSettings(dtype="bfloat16"))

    found, expected = rounded.step(rows, policy()), trainer.step(rows, policy())

    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
    assert {tensor.dtype for tensor in copies(rounded).values()} == {torch.bfloat16}
    exact = {one.name: host_tensor(one) for one in rounded.copy_state().files()["model"]}
    assert {one.dtype for one in exact.values()} == {torch.float32}
    for name, published in copies(rounded).items():
        off, least = ((one.float() - exact[name]).abs() for one in (published, exact[name].bfloat16()))
        assert torch.equal(off, least), name


def test_dropout_of_a_model_is_never_applied(model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"attention_dropout": 0.5}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    rows = policy_rows(np.random.default_rng(8), 9)
    plain, dropping = (TorchTrainer(path) for path in (model, tmp_path / "model"))

    expected, found = plain.step(rows, policy()), dropping.step(rows, policy())

    assert found == expected


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_recomputing_activations_changes_nothing(model, trainer):
    rows = policy_rows(np.random.default_rng(8), 9)
    trainer.step(rows, policy())
    sparing = TorchTrainer(model, TorchSettings(recompute=True))
    sparing.step(rows, policy())
    assert_same_bits(copies(sparing), copies(trainer))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_activations_in_host_memory_change_nothing(model, trainer):
    rows = policy_rows(np.random.default_rng(8), 9)
    trainer.step(rows, policy())
    sparing = TorchTrainer(model, TorchSettings(offload_activations=True))
    sparing.step(rows, policy())
    assert_same_bits(copies(sparing), copies(trainer))


def test_only_hidden_states_of_the_sequence_move_to_host_memory():
    hidden, other = (torch.full((1, length, 2), 3.0, requires_grad=True) for length in (7, 8))
    with activations_on_host(7):
        total = hidden.square().sum() + other.square().sum()
    for one in (hidden, other):
        one.data.zero_()
    torch.autograd.backward(total)

    assert hidden.grad.eq(6.0).all()  # of the copy
    assert other.grad.eq(0.0).all()
