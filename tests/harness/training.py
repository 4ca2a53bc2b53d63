"""Rows to train on, objectives, and copies of a trainer's weights."""

import dataclasses

import numpy as np
import torch
from safetensors.torch import load_file

from asyncrl.algorithms.batches import GradedGroup, GradedTrajectory, build_rows
from asyncrl.algorithms.losses import loss_of
from asyncrl.algorithms.rows import TrainRow
from asyncrl.weights.folders import DiskFolder
from asyncrl.weights.tensors import write_tensors
from topics.batches import Objective
from topics.trajectories import Segment

FIRST, EQUALS, END = 3, 29, 2  # ids of the letter a, of "=" and of the end


def reverse_groups(rng, count):
    """Supervised rows: a word of three letters, its reverse, the end."""
    for index in range(count):
        word = rng.integers(0, 26, 3) + FIRST
        tokens = np.array([*word, EQUALS, *word[::-1], END], np.int32)
        mask = np.array([0] * 4 + [1] * 4, np.uint8)
        segment = Segment(tokens, mask, np.zeros(8, np.float32), np.full(8, -1, np.int32))
        yield GradedGroup([GradedTrajectory(f"s{index}", [segment])])


def supervised_rows(rng, count):
    return build_rows(list(reverse_groups(rng, count)), Objective(), step=0, min_version=0)[0]


def policy_rows(rng, count):
    """Rows of many lengths, each third without advantage, as a sampler might have made them."""
    rows = []
    for index in range(count):
        size = int(rng.integers(4, 20))
        mask = (np.arange(size) >= 3).astype(np.uint8)
        rows.append(
            TrainRow(
                trajectory_id=f"p{index}",
                tokens=rng.integers(FIRST, EQUALS, size).astype(np.int32),
                mask=mask,
                logprobs=np.where(mask, rng.uniform(-4.5, -2.5, size), 0.0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=np.full(size, rng.normal() if index % 3 else 0.0, np.float32),
                weights=np.full(size, 1.0 / (count * (size - 3)), np.float32),
                temperature=0.8 if index % 2 else 1.6,
                estimator="grpo",
            )
        )
    return rows


def sft(rate=4e-3):
    return Objective(loss="sft", learning_rate=rate)


def policy(rate=1e-3):
    return Objective(loss="decoupled", learning_rate=rate)


def filled(row, name, value):
    return dataclasses.replace(row, **{name: np.full(len(row.tokens), value, np.float32)})


def prepared_by(trainer, rows, objective):
    """Rows as the passes with a gradient get them."""
    return trainer.with_gradient(trainer.with_advantages(rows, objective), loss_of(objective))


def copies(trainer):
    """Weights of a trainer; of one of several ranks those that it writes."""
    held = [one for tensors in trainer.copy_weights().files().values() for one in tensors]
    return {one.name: host_tensor(one).clone() for one in held}


def host_tensor(one):
    """A tensor in host memory as torch has it; valid until the next copy."""
    return torch.from_numpy(one.content).view(getattr(torch, one.dtype)).view(one.shape)


def of_all_ranks(folder, stem):
    """Tensors of the files STEM*.safetensors, which the ranks of a group left."""
    found = {}
    for path in folder.glob(f"{stem}*.safetensors"):
        found |= load_file(path)
    return found


def save(trainer, directory):
    write_tensors(DiskFolder(directory), trainer.copy_state().files())
