"""Steps that are far out of what is usual name the trajectories that carry them, and are trained as any other."""

import dataclasses
import math

import numpy as np
import pytest

from asyncrl.training.anomalies import Recent, Usual, departure
from asyncrl.training.init_model import ModelShape, create_model
from asyncrl.training.protocol import NonFiniteLoss
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from harness.ranks import run_ranks
from harness.training import copies, filled, policy, policy_rows
from topics.batches import Distillation, Objective

ALL = Usual((-math.inf, math.inf), 0.0)  # every step departs from it


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    create_model(
        directory,
        alphabet="abcdefghijklmnopqrstuvwxyz=",
        seed=0,
        shape=ModelShape(hidden=32, head_dim=16, ffn=64, context=32),
    )
    return directory


def after(*steps, times=10.0, stage="rl"):
    recent = Recent(times)
    for loss, norm in steps:
        recent.add(stage, {"loss": loss, "grad_norm": norm})
    return recent


# --- the rule


def test_the_range_is_made_of_medians():
    losses = (1, 2, 3, 4, 5, 6, 7, 1000)  # median 4.5, its distances 0.5 0.5 1.5 1.5 2.5 2.5 3.5 995.5: median 2
    found = after(*((loss, loss) for loss in losses)).usual("rl")

    assert found == Usual((4.5 - 20, 4.5 + 20), 45.0)
    assert departure(found, 24.4, 45.0) == ""
    assert departure(found, 24.6, 46) == "gradient norm 46, usual is up to 45; loss 24.6, usual is -15.5 to 24.5"
    assert departure(found, -16, 1) == "loss -16, usual is -15.5 to 24.5"


def test_too_few_steps_other_stages_and_steps_without_gradient_say_nothing():
    assert after(*[(1.0, 1.0)] * 7).usual("rl") is None
    assert after(*[(1.0, 1.0)] * 8).usual("rl") is not None
    assert after(*[(1.0, 1.0)] * 8).usual("warmup") is None
    assert after(*[(1.0, 1.0)] * 8, times=0.0).usual("rl") is None
    assert after(*[(0.0, 0.0)] * 8).usual("rl") is None
    recent = after(*[(0.0, 1.0)] * 8)
    recent.add("rl", {})  # a skipped one
    assert recent.usual("rl") == Usual((-0.5, 0.5), 10.0)


def test_a_loss_is_no_anomaly_beside_losses_of_rounding():
    rounding = after(*[(2e-7 * (-1) ** number, 1.0) for number in range(9)]).usual("rl")

    assert departure(rounding, -0.04996, 2.0) == ""
    assert departure(rounding, 0.6, 2.0) == "loss 0.6, usual is -0.5 to 0.5"


def test_a_level_that_stays_becomes_usual():
    recent = after(*[(0.0, 1.0)] * 40)
    found = []
    for _ in range(20):
        found.append(departure(recent.usual("rl"), 0.0, 50.0) != "")
        recent.add("rl", {"loss": 0.0, "grad_norm": 50.0})

    assert found == [True] * 16 + [False] * 4  # at 16 of 32 the median lies between the two


# --- the trajectories


def poisoned(rows, times):
    """Rows of which the fifth has so many times its advantage."""
    return [*rows[:4], filled(rows[4], "advantages", times), *rows[5:]]


@pytest.mark.parametrize("loss", ["ppo", "decoupled", "gspo", "reinforce"])
def test_the_row_that_carries_the_gradient_is_named_and_the_step_is_as_without_a_look(model, loss):
    plain, watched = TorchTrainer(model), TorchTrainer(model)
    rows = poisoned(policy_rows(np.random.default_rng(4), 40), -300.0)
    objective = Objective(loss=loss, learning_rate=1e-3, loss_options={"entropy": 0.01} if loss == "ppo" else {})

    expected, found = plain.step(rows, objective), watched.step(rows, objective, ALL)

    assert found == expected
    assert watched.anomaly.found.startswith(f"gradient norm {expected['grad_norm']:.4g}, usual is up to 0")
    (carrier,) = watched.anomaly.carriers
    assert carrier.trajectory_id == "p4"
    assert carrier.grad_norm == pytest.approx(expected["grad_norm"], rel=0.2)
    alone = TorchTrainer(model).step([rows[4]], objective)
    assert (carrier.loss, carrier.grad_norm) == (alone["loss"], alone["grad_norm"])
    weights = copies(watched)
    assert all(np.array_equal(weights[name], tensor) for name, tensor in copies(plain).items())
    watched.step(rows, objective)
    assert watched.anomaly is None


def test_a_pull_through_a_teachers_outcomes_counts_as_well(model):
    trainer = TorchTrainer(model, TorchSettings(teacher=model))
    rows = [filled(row, "advantages", 0.0) for row in policy_rows(np.random.default_rng(4), 24)]
    objective = Objective(loss="ppo", learning_rate=1e-2, distillation=Distillation(coef=1.0, top_k=4))
    trainer.step(policy_rows(np.random.default_rng(4), 24), Objective(loss="ppo", learning_rate=1e-2))  # away from it
    heavy = dataclasses.replace(rows[4], weights=rows[4].weights * 1000)

    trainer.step([*rows[:4], heavy, *rows[5:]], objective, ALL)

    assert trainer.anomaly.carriers[0].trajectory_id == "p4"


def test_an_anomaly_of_all_rows_names_the_largest_and_tries_sixteen(model, monkeypatch):
    trainer, tried = TorchTrainer(model), []
    rows = [
        dataclasses.replace(row, trajectory_id=f"p{at // 2}")
        for at, row in enumerate(policy_rows(np.random.default_rng(4), 60))
    ]
    gradient = trainer._gradient
    monkeypatch.setattr(
        trainer, "_gradient", lambda batches, loss: (tried.append(len(batches)), gradient(batches, loss))[1]
    )

    trainer.step(rows, policy(), ALL)

    assert len(tried) == 1 + 16 + 1  # the batch, single rows, the batch again
    carriers = trainer.anomaly.carriers
    assert 1 < len(carriers) <= 8
    assert len({carrier.trajectory_id for carrier in carriers}) == len(carriers)
    norms = [carrier.grad_norm for carrier in carriers]
    assert norms == sorted(norms, reverse=True) and norms[-1] >= 0.1 * norms[0]


def test_a_row_that_no_first_look_finds_is_found_by_trying_all(model):
    trainer = TorchTrainer(model)
    rows = policy_rows(np.random.default_rng(4), 60)
    hidden = dataclasses.replace(
        filled(rows[58], "advantages", 1e-3), temperature=1e-38
    )  # only the model's part overflows
    with pytest.raises(NonFiniteLoss, match=r"caused by 1 of (1[7-9]|[2-9]\d) rows tried alone, of trajectories p58;"):
        trainer.step([*rows[:58], hidden, rows[59]], policy())


RANKS = """
import sys
from pathlib import Path
import numpy as np, torch.distributed as dist
from asyncrl.training.protocol import NonFiniteLoss
from asyncrl.training.torch.trainer import TorchTrainer
from tests.harness.training import policy, policy_rows, filled
from tests.training.test_anomalies import ALL, poisoned
rank, ranks, model, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
dist.init_process_group("gloo", store=dist.FileStore(str(out / "store"), ranks), rank=rank, world_size=ranks)
trainer = TorchTrainer(model)
rows = policy_rows(np.random.default_rng(4), 24)
own = slice(0, 3) if rank == 0 else slice(3, 24)
trainer.step(poisoned(rows, -300.0)[own], policy(), ALL)
print([(one.trajectory_id, round(one.grad_norm, 3)) for one in trainer.anomaly.carriers])
try:
    trainer.step(poisoned(rows, float("nan"))[own], policy())
except NonFiniteLoss as error:
    print(error)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_every_rank_names_a_row_of_another(model, tmp_path):
    output = run_ranks(RANKS, 2, model, tmp_path).splitlines()

    alone = TorchTrainer(model)
    alone.step(poisoned(policy_rows(np.random.default_rng(4), 24), -300.0), policy(), ALL)
    assert output[0] == str([(one.trajectory_id, round(one.grad_norm, 3)) for one in alone.anomaly.carriers])
    assert "rows tried alone, of trajectories p4; the weights were not touched" in output[1]
