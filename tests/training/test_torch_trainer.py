import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.algorithms.advantages import ADVANTAGES, Estimator
from asyncrl.algorithms.losses import LOSSES, loss_of
from asyncrl.algorithms.token_loss import Loss
from asyncrl.data.model_dir import check_model_directory
from asyncrl.training.checkpoint import CheckpointError
from asyncrl.training.create import ModelShape, create_model
from asyncrl.training.protocol import NonFiniteLoss, RowError
from asyncrl.training.torch_trainer import TorchSettings, TorchTrainer
from asyncrl.weights.files import write_model
from asyncrl.weights.folders import DiskFolder
from harness.training import (
    copies,
    filled,
    policy,
    policy_rows,
    save,
    sft,
    supervised_rows,
)
from topics.batches import Objective

ALPHABET = "abcdefghijklmnopqrstuvwxyz="
SHAPE = ModelShape(hidden=32, head_dim=16, ffn=64, context=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    create_model(directory, alphabet=ALPHABET, seed=0, shape=SHAPE)
    return directory


@pytest.fixture
def trainer(model):
    return TorchTrainer(model)


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

    prepared = before_it.prepare(rows, loss_of(recomputed))
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

    with pytest.raises(RowError, match=r'p0: the objective needs the column "teacher", .* fills only proximal'):
        trainer.step(rows, objective)
    given = [dataclasses.replace(row, columns={"teacher": np.full(len(row.tokens), -1.0, np.float32)}) for row in rows]
    assert trainer.step(given, objective)["grad_norm"] > 0
    trainer.scorers["teacher"] = trainer._policy
    assert trainer.step(rows, objective)["grad_norm"] == 0  # a model is no distance from itself


def test_an_advantage_of_tokens_is_made_of_columns(trainer, monkeypatch):
    def of_row(row):
        return row.advantages - row.columns["proximal"]

    monkeypatch.setitem(ADVANTAGES, "of tokens", Estimator(list, of_row=of_row, needs=("proximal",)))
    rows = policy_rows(np.random.default_rng(2), 6)
    rows[:4] = [dataclasses.replace(row, estimator="of tokens") for row in rows[:4]]

    made = trainer.prepare(rows, loss_of(policy()))

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


def test_training_resumes_bit_equal(model, tmp_path):
    rng = np.random.default_rng(3)
    batches = [policy_rows(rng, 12) for _ in range(4)]
    whole, first, second = (TorchTrainer(model) for _ in range(3))
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


def test_a_checkpoint_of_another_model_is_refused(trainer, tmp_path):
    create_model(tmp_path / "other", alphabet=ALPHABET + "+", seed=0, shape=SHAPE)
    (tmp_path / "saved").mkdir()
    save(TorchTrainer(tmp_path / "other"), tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \(31, 32\).*has \(30, 32\)"):
        trainer.load(tmp_path / "saved")


@pytest.mark.parametrize("broken", [("advantages", float("nan")), ("weights", float("inf"))])
def test_a_loss_that_is_no_number_names_its_trajectory_and_leaves_the_weights(model, broken):
    trainer, untouched = TorchTrainer(model), TorchTrainer(model)
    rows = policy_rows(np.random.default_rng(4), 8)
    for one in (trainer, untouched):
        one.step(rows, policy())
    before = copies(trainer)

    with pytest.raises(NonFiniteLoss, match=r"loss .* 1 of 5 rows, of trajectories p4;"):
        trainer.step([*rows[:4], filled(rows[4], *broken), *rows[5:]], policy())

    assert_same_bits(before, copies(trainer))
    for one in (trainer, untouched):
        one.step(rows, policy())
    assert_same_bits(copies(untouched), copies(trainer))


def test_a_row_the_model_cannot_read_is_refused(trainer):
    row = policy_rows(np.random.default_rng(5), 2)[1]
    with pytest.raises(RowError, match="p1: 33 tokens, the model's context is 32"):
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
    assert check_model_directory(tmp_path / "out") == ("Qwen3ForCausalLM", 30, 32)


def test_bfloat16_publishes_rounded_weights_of_float32_masters(model, trainer):
    rows = policy_rows(np.random.default_rng(7), 9)
    rounded = TorchTrainer(model, TorchSettings(dtype="bfloat16"))

    found, expected = rounded.step(rows, policy()), trainer.step(rows, policy())

    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
    assert {tensor.dtype for tensor in copies(rounded).values()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in rounded._policy.parameters()} == {torch.float32}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_recomputing_activations_changes_nothing(model, trainer):
    rows = policy_rows(np.random.default_rng(8), 9)
    trainer.step(rows, policy())
    sparing = TorchTrainer(model, TorchSettings(recompute=True))
    sparing.step(rows, policy())
    assert_same_bits(copies(sparing), copies(trainer))


SHARDED = """
import faulthandler, sys
from datetime import timedelta
from pathlib import Path
import numpy as np, torch.distributed as dist
from asyncrl.training.torch_trainer import TorchTrainer
from tests.harness.training import policy, policy_rows, copies, save
from torch.distributed.tensor import DTensor
from safetensors.torch import save_file
rank, ranks, model, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
faulthandler.dump_traceback_later(100)  # says where a rank hangs, before the test gives up
store = dist.FileStore(str(out / "store"), ranks)
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
trainer = TorchTrainer(model)
assert all(isinstance(parameter, DTensor) for parameter in trainer._policy.parameters())
batches = [policy_rows(np.random.default_rng(seed), 24) for seed in (1, 2)]
share = slice(0, 24) if ranks == 1 else (slice(0, 3), slice(3, 24))[rank]
for rows in batches:
    found = trainer.step(rows[share], policy())
state = out / "state"
if rank == 0:
    state.mkdir()
dist.barrier()
save(trainer, state)
dist.barrier()
trainer.load(state)
weights = copies(trainer)
if rank == 0:
    print(found["loss"], found["grad_norm"], found["ess"], found["ratio_max"])
    save_file(weights, out / "weights.safetensors")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sharded_training_equals_plain_training(model, trainer, tmp_path, ranks):
    root = str(Path(__file__).parents[2])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, str(rank), str(ranks), str(model), str(tmp_path)],
            cwd=root,
            stdout=subprocess.PIPE,
            text=True,
            # The loopback: whatever the machine's own name resolves to, the ranks find one another.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(ranks)
    ]
    try:
        output = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks

    for seed in (1, 2):
        expected = trainer.step(policy_rows(np.random.default_rng(seed), 24), policy())
    found = [float(value) for value in output[0].split()]
    assert found == pytest.approx([expected[key] for key in ("loss", "grad_norm", "ess", "ratio_max")], rel=1e-3)
    sharded = load_file(tmp_path / "weights.safetensors")
    for name, tensor in copies(trainer).items():
        assert torch.allclose(sharded[name], tensor, atol=2e-4), name
