"""Further models in a trainer: what they fill in, when they change, and that a restart gives the same bits."""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.distillation import DIRECTIONS
from asyncrl.algorithms.losses import loss_of
from asyncrl.training.init_model import create_model
from asyncrl.training.protocol import RowError
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from harness.ranks import run_ranks
from harness.roles import ALPHABET, LORA, SHAPE, TO_REFERENCE, TO_TEACHER, assert_same_bits, scored, with_penalties
from harness.training import copies, filled, of_all_ranks, policy_rows, prepared_by, save
from topics.batches import CriticStep, Distillation, Objective, Penalty


def test_a_reference_keeps_the_weights_before_its_first_step_until_it_is_renewed(models):
    trainer, rows = TorchTrainer(models / "policy"), policy_rows(np.random.default_rng(1), 12)
    trainer.step(rows, Objective(learning_rate=1e-2))  # as a warm-up does
    start = scored(trainer, rows, "proximal")

    found = [trainer.step(rows, with_penalties(TO_REFERENCE, reference=0)) for _ in range(2)]
    assert np.array_equal(scored(trainer, rows, "reference"), start)
    assert not np.array_equal(scored(trainer, rows, "proximal"), start)
    later = scored(trainer, rows, "proximal")
    trainer.step(rows, with_penalties(TO_REFERENCE, reference=2))
    assert np.array_equal(scored(trainer, rows, "reference"), later)
    trainer.step(rows, with_penalties(TO_REFERENCE, reference=2))
    assert np.array_equal(scored(trainer, rows, "reference"), later)
    behaviour = np.concatenate([row.logprobs[row.mask == 1] for row in rows])
    assert found[0]["reference_kl"] == pytest.approx(float((behaviour - start).mean()), rel=1e-4)


def test_the_kl_of_the_first_step_is_zero_on_log_probs_of_the_trainer(models):
    trainer, rows = TorchTrainer(models / "policy"), policy_rows(np.random.default_rng(1), 12)
    of_trainer = Penalty("reference", 0.1, "k3", recomputed=True)

    first, second = (trainer.step(rows, with_penalties(of_trainer)) for _ in range(2))

    assert first["reference_kl"] == 0.0
    assert second["reference_kl"] > 0.0


def test_training_with_a_reference_resumes_bit_equal(models, tmp_path):
    rng = np.random.default_rng(3)
    batches = [policy_rows(rng, 12) for _ in range(6)]
    objectives = [with_penalties(TO_REFERENCE, reference=step // 4 * 4) for step in range(6)]
    whole, first, second = (TorchTrainer(models / "policy") for _ in range(3))
    for rows, objective in zip(batches, objectives, strict=True):
        whole.step(rows, objective)
    for rows, objective in zip(batches[:3], objectives[:3], strict=True):
        first.step(rows, objective)
    save(first, tmp_path)
    second.step(batches[5], objectives[5])  # its own reference is replaced
    second.load(tmp_path)
    kept = scored(second, batches[0], "reference")
    assert np.array_equal(kept, scored(first, batches[0], "reference"))
    for rows, objective in zip(batches[3:], objectives[3:], strict=True):
        second.step(rows, objective)  # the reference is renewed on the way

    assert_same_bits(whole, second)
    assert not np.array_equal(kept, scored(second, batches[0], "reference"))


def test_a_teacher_pulls_the_policy_towards_itself_whatever_the_rewards(models):
    trainer = TorchTrainer(models / "policy", TorchSettings(teacher=models / "teacher"))
    rows = [
        dataclasses.replace(row, advantages=np.zeros_like(row.advantages), estimator="zero")
        for row in policy_rows(np.random.default_rng(1), 24)
    ]
    teacher = scored(trainer, rows, "teacher")
    assert np.array_equal(teacher, scored(TorchTrainer(models / "teacher"), rows, "proximal"))

    made = prepared_by(trainer, rows, with_penalties(TO_TEACHER))
    for row in made:
        expected = np.where(row.mask, row.columns["teacher"] - row.columns["proximal"], 0.0)
        assert np.allclose(row.advantages, expected, atol=1e-6)
    for _ in range(3):
        trainer.step(rows, with_penalties(TO_TEACHER))
    gaps = teacher - scored(trainer, rows, "proximal")

    before = teacher - scored(TorchTrainer(models / "policy"), rows, "proximal")
    assert np.abs(gaps).mean() < np.abs(before).mean()
    assert np.array_equal(scored(trainer, rows, "teacher"), teacher)


def distilling(top_k, direction="reverse", loss="decoupled"):
    return Objective(loss=loss, learning_rate=1e-2, distillation=Distillation(top_k, 1.0, direction))


def whole_logprobs(directory, row):
    """Of every token of the vocabulary before each trained token, at the temperature of the row, [N, V]."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        logits = model(torch.from_numpy(row.tokens)[None].long()).logits[0, :-1]
    return (logits[row.mask[1:] == 1] / row.temperature).log_softmax(-1)


def test_a_teacher_names_its_most_probable_tokens(models):
    trainer = TorchTrainer(models / "policy", TorchSettings(teacher=models / "teacher"))
    rows = policy_rows(np.random.default_rng(1), 9)

    made = prepared_by(trainer, rows, distilling(5))

    assert len(made) == 9  # those without advantage, too
    for row in made:
        values, ids = whole_logprobs(models / "teacher", row).topk(5)
        found = row.columns["teacher_top"][row.mask == 1]
        assert found[..., 0].tolist() == ids.tolist()
        assert np.allclose(found[..., 1], values, atol=1e-5)


def test_the_step_has_the_divergence_over_the_whole_vocabulary_where_it_is_asked_for(models):
    trainer = TorchTrainer(models / "policy", TorchSettings(teacher=models / "teacher"))
    row = dataclasses.replace(policy_rows(np.random.default_rng(1), 2)[1], estimator="zero")
    row = dataclasses.replace(row, advantages=np.zeros_like(row.advantages))
    policy, teacher = (whole_logprobs(models / name, row) for name in ("policy", "teacher"))

    found = trainer.step([row], distilling(1000))  # more than there are

    nats = (policy.exp() * (policy - teacher)).sum(-1)
    assert found["teacher_kl"] == pytest.approx(nats.mean().item(), rel=1e-4)
    assert found["loss"] == pytest.approx(float((nats * row.weights[row.mask == 1]).sum()), rel=1e-4)
    assert found["grad_norm"] > 0


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_distillation_on_top_tokens_adds_to_rewards_and_brings_the_policy_near_the_teacher(models, direction):
    settings, rng = TorchSettings(teacher=models / "teacher"), np.random.default_rng(1)
    rows = policy_rows(rng, 24)
    trainer, plain = (TorchTrainer(models / "policy", settings) for _ in range(2))
    alone, rewarded = TorchTrainer(models / "policy", settings), Objective(loss="decoupled", learning_rate=1e-2)
    gradients = []
    for one, objective, given in (
        (trainer, distilling(6, direction), rows),
        (plain, rewarded, rows),
        (alone, distilling(6, direction), [filled(row, "advantages", 0.0) for row in rows]),
    ):
        loss = loss_of(objective)
        one._gradient(one._passes.cut(prepared_by(one, given, objective)), loss)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in one._own.parameters.values()]))
        one._own.forget()
    torch.testing.assert_close(gradients[0], gradients[1] + gradients[2], rtol=1e-4, atol=1e-7)

    found = [alone.step([filled(row, "advantages", 0.0) for row in rows], distilling(6, direction)) for _ in range(6)]
    assert found[-1]["teacher_kl"] < 0.8 * found[0]["teacher_kl"]


def test_a_reference_that_a_checkpoint_lacks_begins_anew(models, tmp_path):
    trainer, rows = TorchTrainer(models / "policy"), policy_rows(np.random.default_rng(1), 12)
    trainer.step(rows, Objective(learning_rate=1e-2))
    save(trainer, tmp_path)
    trainer.step(rows, with_penalties(TO_REFERENCE, reference=20))  # of another lineage

    trainer.load(tmp_path)

    trainer.step(rows, with_penalties(TO_REFERENCE, reference=0))
    later = scored(trainer, rows, "proximal")
    trainer.step(rows, with_penalties(TO_REFERENCE, reference=10))
    assert np.array_equal(scored(trainer, rows, "reference"), later)


SHARDED = """
import faulthandler, sys
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from safetensors.torch import save_file
from asyncrl.training.torch.trainer import TorchTrainer
from tests.harness.training import copies, save
from tests.training.test_roles import every_role, ROWS, objectives
rank, ranks, models, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
faulthandler.dump_traceback_later(290)  # says where a rank hangs, before the test gives up
store = dist.FileStore(str(out / "store"), ranks)
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=290))
trainer, state = every_role(models), out / "state"
share = (slice(0, 3), slice(3, 24))[rank]
for number, objective in enumerate(objectives()):
    found = trainer.step(ROWS(number)[share], objective)
    if number == 1:
        if rank == 0:
            state.mkdir()
        dist.barrier()
        save(trainer, state)
        dist.barrier()
        trainer = every_role(models)
        trainer.load(state)
weights = copies(trainer)
if rank == 0:
    print(*(found[name] for name in FIGURES))
save_file(weights, out / f"weights-{rank}.safetensors")
dist.destroy_process_group()
"""
FIGURES = ("loss", "grad_norm", "reference_kl", "teacher_kl", "value_loss", "value_grad_norm", "explained_variance")


def every_role(models):
    return TorchTrainer(
        models / "policy", TorchSettings(lora=LORA, teacher=models / "teacher", critic=models / "policy")
    )


def objectives():
    step = CriticStep(learning_rate=1e-2)
    plain = [with_penalties(TO_REFERENCE, TO_TEACHER, reference=version) for version in (0, 0, 2)]
    return [msgspec.structs.replace(one, critic=step) for one in plain]


def mixed_rows(seed):
    """Rows of which every second one has its advantages from a critic."""
    rows = policy_rows(np.random.default_rng(seed), 24)
    return [dataclasses.replace(row, estimator="gae") if place % 2 else row for place, row in enumerate(rows)]


def plain(models):
    return TorchTrainer(models / "policy", TorchSettings())


def renewing():
    """A reference that is made anew after it was used, and again after weights that were used have changed."""
    return [with_penalties(TO_REFERENCE, reference=version) for version in (0, 0, 2, 3, 4)]


def own_rows(seed):
    return policy_rows(np.random.default_rng(seed), 24)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "steps", "figures", "rows"),
    [
        (every_role, objectives, FIGURES, mixed_rows),
        (plain, renewing, ("loss", "grad_norm", "reference_kl"), own_rows),
    ],
    ids=["every_role", "reference"],
)
def test_further_models_of_two_ranks_are_those_of_one(models, tmp_path, made, steps, figures, rows):
    script = SHARDED.replace("FIGURES", repr(figures)).replace("every_role", made.__name__)
    script = script.replace("ROWS", rows.__name__)
    output = run_ranks(script.replace("objectives", steps.__name__), 2, models, tmp_path)
    trainer = made(models)
    for number, objective in enumerate(steps()):
        expected = trainer.step(rows(number), objective)

    found = [float(value) for value in output.split()]
    assert found == pytest.approx([expected[name] for name in figures], rel=1e-3, abs=1e-6)
    sharded = of_all_ranks(tmp_path, "weights")
    for name, tensor in copies(trainer).items():
        assert torch.allclose(sharded[name], tensor, atol=5e-4), name


@pytest.mark.parametrize("whose", ["teacher", "critic"])
def test_a_row_that_a_further_model_does_not_take_is_refused(models, tmp_path, whose):
    create_model(tmp_path / "short", alphabet=ALPHABET, seed=1, shape=dataclasses.replace(SHAPE, context=12))
    trainer = TorchTrainer(models / "policy", TorchSettings(**{whose: tmp_path / "short"}))
    (long,) = [row for row in policy_rows(np.random.default_rng(1), 6) if len(row.tokens) > 12][:1]

    with pytest.raises(
        RowError, match=rf"{long.trajectory_id}: {len(long.tokens)} tokens, the {whose}'s context is 12"
    ):
        trainer.step([long], Objective(learning_rate=1e-2))
