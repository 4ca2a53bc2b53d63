"""One of four processes that train the same batch in all ways: `python -m tests.harness.rank_cases RANK MODEL FOLDER`.

Groups of 2, 4 and 1 ranks follow one another in the same processes. The first leaves the gradients of all cases, and
the states before and after a load.
"""

import dataclasses
import faulthandler
import sys
from datetime import timedelta
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from asyncrl.algorithms.balance import balanced
from asyncrl.algorithms.batches import GradedGroup, GradedTrajectory, build_rows
from asyncrl.algorithms.losses import loss_of
from asyncrl.algorithms.whitening import whitened
from asyncrl.training import sharding
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from tests.harness.training import copies, host_tensor, policy, save
from topics.batches import Distillation, Objective
from topics.trajectories import Segment

TOP_K, ROW_TOKENS = 4, 32
OBJECTIVE = Objective(
    loss="ppo",
    aggregation="trajectory",
    loss_options={"masks": ["m2po"], "second_moment_cap": 0.2},
    distillation=Distillation(TOP_K, 0.5, "both"),
)
MICRO_BATCHES = (1, 3, 7)
SAVED, LOADED = 2, (1, 4)  # ranks


def segments(rng, fanned_out, padded):
    """Two turns as one row, or as a row for each: the second has the first as its prompt.

    Args:
        padded: all rows are filled up to one length, with tokens that are not trained.
    """
    first, size = int(rng.integers(5, 12)), int(rng.integers(16, 30))
    tokens = rng.integers(3, 29, size).astype(np.int32)
    logprobs = rng.uniform(-4.5, -2.5, size).astype(np.float32)
    of_first, of_second = (np.zeros(size, np.uint8) for _ in range(2))
    of_first[3:first], of_second[first + 2 :] = 1, 1

    def segment(mask, stop):
        mask, versions = mask[:stop], np.where(mask[:stop], 0, -1).astype(np.int32)
        filled = [tokens[:stop], mask, np.where(mask, logprobs[:stop], 0).astype(np.float32), versions]
        if padded:
            rest = (0, ROW_TOKENS - stop)
            filled = [np.pad(array, rest, constant_values=-1 if array is versions else 0) for array in filled]
        return Segment(*filled)

    return [segment(of_first, first), segment(of_second, size)] if fanned_out else [segment(of_first | of_second, size)]


def rows_of(fanned_out, padded=False):
    """Rows of 32 trajectories in groups of four, uneven in length and reward."""
    rng = np.random.default_rng(0)
    groups = []
    for number in range(8):
        members = []
        for member in range(4):
            own = np.random.default_rng(4 * number + member)
            reward = float(rng.normal())
            members.append(GradedTrajectory(f"p{number}-{member}", segments(own, fanned_out, padded), reward))
        groups.append(GradedGroup(members, "grpo", 0.8 + 0.1 * number))
    return [with_top(row) for row in build_rows(groups, OBJECTIVE, step=1, min_version=0)[0]]


def with_top(row):
    """A row with what a teacher finds most probable: the same at each place of all rows of a trajectory."""
    group, member = map(int, row.trajectory_id[1:].split("-"))
    rng = np.random.default_rng(100 + 4 * group + member)
    logits = rng.normal(size=(ROW_TOKENS, 29))
    ids = np.argsort(-logits)[:, :TOP_K]
    logprobs = np.take_along_axis(logits, ids, 1) - np.log(np.exp(logits).sum(1, keepdims=True))
    top = np.stack([ids, logprobs], -1).astype(np.float32)
    return dataclasses.replace(row, columns={"teacher_top": top[: len(row.tokens)]})


def share(rows, rank, ranks):
    owners = balanced([float(len(row.tokens)) for row in rows], ranks)
    return [row for row, owner in zip(rows, owners, strict=True) if owner == rank]


def gradient(trainer, rows, count):
    """The whole gradient, from so many micro-batches."""
    loss = loss_of(OBJECTIVE)
    rows = trainer.with_gradient(whitened(rows, trainer._passes.gathered), loss)
    named = np.concatenate([row.columns["m2po"][row.mask != 0] for row in rows])
    assert 0 < named.sum() < len(named)  # of every rank
    trainer._policy.zero_grad()
    trainer._gradient([[rows[index] for index in part] for part in np.array_split(range(len(rows)), count)], loss)
    named = trainer._policy.model.named_parameters()
    found = {name: parameter.grad for name, parameter in named}
    trainer._policy.zero_grad()
    return {name: one.full_tensor() if isinstance(one, DTensor) else one.clone() for name, one in found.items()}


def state(trainer):
    """Weights and moments of this rank."""
    return {
        f"{stem.partition('-')[0]}.{one.name}": host_tensor(one).clone()
        for stem, tensors in trainer.copy_state().files().items()
        for one in tensors
    }


def run(rank, ranks, model, folder):
    """All cases of one group."""
    store = dist.FileStore(str(folder / f"store{ranks}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=290))
    found = {}
    for fanned_out, padded in product((False, True), repeat=2):
        trainer = TorchTrainer(model, TorchSettings(exchange="micro_batch" if padded else "step"))
        assert {isinstance(parameter, DTensor) for parameter in trainer._policy.parameters()} == {ranks > 1}
        own = share(rows_of(fanned_out, padded), rank, ranks)
        assert ranks == 1 or trainer._policy.sharded.once != padded
        assert not padded or {len(row.tokens) for row in own} == {ROW_TOKENS}
        for count in MICRO_BATCHES:
            case = f"{ranks}-{count}-{'fanned' if fanned_out else 'merged'}-{'padded' if padded else 'packed'}"
            found |= {f"{case}/{name}": one for name, one in gradient(trainer, own, count).items()}
    states = {}
    own, saved = share(rows_of(False), rank, ranks), folder / "saved"
    if ranks == SAVED:
        trainer.step(own, policy())
        if rank == 0:
            saved.mkdir()
        dist.barrier()
        save(trainer, saved)
        dist.barrier()
    if ranks in (SAVED, *LOADED):
        sharding._memory = lambda _: float(rank << 40)  # GPUs that differ: the least one decides for all
        trainer = TorchTrainer(model)
        assert ranks == 1 or not trainer._policy.sharded.once
        trainer.load(saved)
        states = {f"before/{name}": tensor for name, tensor in state(trainer).items()}
        trainer.step(own, policy())
        states |= {f"after/{name}": tensor for name, tensor in copies(trainer).items()}
    if rank == 0:
        save_file(found, folder / f"gradients{ranks}.safetensors")
    save_file(states, folder / f"states{ranks}-{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(290)  # says where a rank hangs, before the test gives up
    torch.set_num_threads(1)
    for ranks in (2, 4, 1):
        if int(sys.argv[1]) < ranks:
            run(int(sys.argv[1]), ranks, Path(sys.argv[2]), Path(sys.argv[3]))
