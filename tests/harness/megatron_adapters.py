"""One of two processes that train adapters in several layouts of megatron-core.

`python -m tests.harness.megatron_adapters RANK FOLDER`: FOLDER has the models, and a checkpoint of the torch trainer
for each; it gets files of each case.
"""

import faulthandler
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from asyncrl.training.lora import Lora
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.megatron.settings import MegatronSettings
from asyncrl.training.megatron.trainer import MegatronTrainer
from tests.harness.groups import megatron_ranks
from tests.harness.megatron_cases import (
    EPS,
    EXPERTS,
    FIGURES,
    objective,
    rows_of,
    share,
    state,
    weights,
)
from tests.harness.mixtures import routed_rows
from tests.harness.training import copies, save

DELTA = "qwen3.5"
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = {
    DELTA: (*DENSE, "in_proj_qkv", "in_proj_z", "out_proj"),
    "qwen2-tied": ("q_proj", "v_proj", "up_proj", "down_proj"),
    EXPERTS: ("k_proj", "o_proj", "experts"),
}


class Case(NamedTuple):
    """A model with adapters in a layout of two ranks."""

    model: str
    layout: Layout
    published: bool = False  # versions are adapters
    dtype: str = "float32"


CASES = {
    "tensor": Case(DELTA, Layout(tensor=2), published=True),
    "stages": Case("qwen2-tied", Layout(pipeline=2)),
    "experts": Case(EXPERTS, Layout(tensor=2, expert=2)),
    "copied-experts": Case(EXPERTS, Layout()),
    "rounded": Case("qwen2-tied", Layout(tensor=2), published=True, dtype="bfloat16"),
}
"""The first ones recompute layers in the backward pass."""
RECOMPUTED = ("tensor", "stages")
STEPS = 2  # with a checkpoint between them


def lora_of(case):
    return Lora(rank=4, alpha=8.0, targets=TARGETS[case.model], published=case.published)


def rows_at(case, step):
    return routed_rows(rows_of(step), step) if case.model == EXPERTS else rows_of(step)


def opened(folder, name):
    case = CASES[name]
    settings = MegatronSettings(
        case.layout,
        dtype=case.dtype,
        micro_batch_tokens=64,
        eps=EPS,
        recompute=name in RECOMPUTED,
        replays=case.model == EXPERTS,
        lora=lora_of(case),
    )
    return MegatronTrainer(folder / case.model, settings)


def step(trainer, case, number, rank):
    metrics = trainer.step(share(rows_at(case, number), case.layout, rank, 2), objective(number))
    return torch.tensor([metrics[name] for name in FIGURES], dtype=torch.float64)


def trained(folder, name, rank):
    """Two steps with a checkpoint between them; then the second one from it, and from one of the torch trainer."""
    case, trainer, found = CASES[name], opened(folder, name), {}
    (folder / name).mkdir(exist_ok=True)
    found["first"] = step(trainer, case, 0, rank)
    saved = state(trainer)
    save(trainer, folder / name)
    dist.barrier()
    found["second"] = step(trainer, case, 1, rank)
    found |= {f"after.{key}": one for key, one in weights(trainer).items()}
    if case.published:
        found |= {f"adapter.{key}": one for key, one in copies(trainer).items()}
    for whose in (name, f"torch-{case.model}"):
        resumed = opened(folder, name)
        resumed.load(folder / whose)
        if whose == name:
            for key, one in state(resumed).items():
                assert torch.equal(one, saved[key]), key
        found[f"second.{whose}"] = step(resumed, case, 1, rank)
        found |= {f"{whose}.{key}": one for key, one in weights(resumed).items()}
    if rank == 0:
        save_file({key: one.contiguous() for key, one in found.items()}, folder / f"{name}.safetensors")
    dist.barrier()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(290)
    own, place = int(sys.argv[1]), Path(sys.argv[2])
    for each in sys.argv[3:] or CASES:
        with megatron_ranks(place / f"store-{each}", own, 2, deadline_s=280):
            trained(place, each, own)
