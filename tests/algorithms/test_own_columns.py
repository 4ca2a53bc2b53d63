"""Columns of the user's own: filled where rows are made, so that whoever trains, replays or dumps a batch has them."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from asyncrl.algorithms.batches import GradedGroup, GradedTrajectory, build_rows
from asyncrl.algorithms.named import AlgorithmError
from asyncrl.config.load import load_config
from asyncrl.training.init_model import ModelShape, create_model
from asyncrl.training.objective import objective_of
from asyncrl.training.torch.trainer import TorchTrainer
from harness.configs import problems
from harness.training import copies
from topics.batches import Objective
from topics.trajectories import Segment

MINE = '''
import numpy as np

from asyncrl import Loss


class Recent(Loss, frozen=True):
    """The gradient of newer tokens counts more."""

    needs = ("recency",)

    def __call__(self, logprobs, tokens):
        weights = tokens.weights * tokens.columns["recency"]
        return -(weights * tokens.advantages * logprobs).sum(), {"tokens": (tokens.weights > 0).sum()}


def recency(row):
    return 1.0 / (row.step - np.maximum(row.versions, 0))


def evenly(row):
    return np.ones(len(row.tokens))


def short(row):
    return np.zeros(1)


def endless(row):
    return np.full(len(row.tokens), np.inf)


def raises(row):
    return row.metadata
'''
NAMED = ["learner.loss=mine.py:Recent", 'learner.columns={ recency = "mine.py:recency" }']


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    config = tmp_path / "own.toml"
    config.write_text('run = "own"\n[eval]\nprompts = 0\n')
    return config


def rows_with(objective: Objective):
    segment = Segment(
        np.arange(4, dtype=np.int32),
        np.array([0, 1, 1, 1], np.uint8),
        np.zeros(4, np.float32),
        np.array([-1, 1, 3, 4], np.int32),
    )
    group = GradedGroup([GradedTrajectory("p000000-0", [segment], 1.0)], "none")
    return build_rows([group], objective, step=5, min_version=0)[0]


def test_rows_have_the_columns_that_the_objective_names(mine: Path):
    config = load_config(str(mine), overrides=NAMED).config
    objective = msgspec.json.decode(msgspec.json.encode(objective_of(config, 5)), type=Objective)

    [row] = rows_with(objective)

    assert objective.columns == {"recency": f"{mine.parent}/mine.py:recency"}
    assert row.columns["recency"].tolist() == pytest.approx([1 / 5, 1 / 4, 1 / 2, 1.0])
    assert row.columns["recency"].dtype == np.float32
    assert rows_with(Objective())[0].columns == {}


@pytest.mark.parametrize(
    ("function", "found"),
    [
        ("short", r"a column of shape \(1,\) for 4 tokens"),
        ("endless", "a column with inf at token 0; each must be a finite number"),
        ("raises", "raises raised"),
    ],
)
def test_a_column_is_one_finite_number_for_each_token(mine: Path, function: str, found: str):
    with pytest.raises(AlgorithmError, match=found):
        rows_with(Objective(columns={"own": f"{mine.parent}/mine.py:{function}"}))
    wrong = ["learner.loss=mine.py:Recent", f'learner.columns={{ recency = "mine.py:{function}" }}']
    [problem] = problems(str(mine), *wrong, files=True)
    assert problem.key == "--set learner.columns.recency"
    assert f"mine.py:{function}: " in problem.message


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        (NAMED[:1], "learner.loss", 'needs the column "recency", and nothing fills it'),
        (NAMED[1:], "learner.columns.recency", "has no effect: no loss needs this column"),
        (
            ['learner.columns={ values = "mine.py:recency" }'],
            "learner.columns.values",
            "is a column that the learner fills",
        ),
        (['learner.columns={ own = "mine.py:gone" }'], "learner.columns.own", "gone"),
    ],
)
def test_columns_are_checked(mine: Path, settings: list[str], key: str, message: str):
    found = problems(str(mine), *settings)

    assert [(one.key, message in one.message) for one in found] == [(f"--set {key}", True)]


def test_a_trainer_gives_the_column_to_the_loss_the_same_bits_again(mine: Path):
    config = load_config(str(mine), overrides=[*NAMED, "learner.lr=1e-3"]).config
    create_model(
        mine.parent / "tiny", alphabet="abcdefgh=", seed=0, shape=ModelShape(32, head_dim=16, ffn=64, context=32)
    )
    objective = objective_of(config, 5)
    other = msgspec.structs.replace(objective, columns={"recency": f"{mine.parent}/mine.py:evenly"})

    norms, weights = [], []
    for each in (objective, objective, other):
        trainer = TorchTrainer(mine.parent / "tiny")
        norms.append(trainer.step(rows_with(each), each)["grad_norm"])
        weights.append(copies(trainer))

    assert norms[0] == norms[1] != norms[2]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
