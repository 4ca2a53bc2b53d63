"""One of two processes that train a layer that predicts ahead, and correction biases, in several layouts.

`python -m tests.harness.megatron_ahead RANK FOLDER`: FOLDER has a model for each family, and gets a file of each case.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from asyncrl.algorithms.balance import balanced
from asyncrl.algorithms.losses import loss_of
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.megatron.settings import MegatronSettings
from asyncrl.training.megatron.trainer import MegatronTrainer
from tests.harness.groups import megatron_ranks
from tests.harness.megatron_cases import EPS, gradient, objective, rows_of, weights, whole
from tests.harness.mixtures import GROUPS, SMALL
from tests.harness.training import save

FAMILIES = {"glm4-moe": SMALL["glm4-moe"], "deepseek-v3": SMALL["deepseek-v3"]}
TRAINED = "deepseek-v3"
WEIGHT, RATE, STEPS = 0.3, 0.01, 2
CASES = {
    "tensor": (2, Layout(tensor=2, expert=2)),
    "pipeline": (2, Layout(pipeline=2, virtual=2)),
    "context": (2, Layout(context=2)),
    "data": (2, Layout(expert=2)),
    "one": (1, Layout()),
}
"""By name: ranks and layout."""
GRADIENTS = ("tensor", "pipeline", "one")
"""In which gradients are whole."""
EXPERTS = GROUPS["n_routed_experts"]


def opened(folder, name, layout, **further):
    return MegatronTrainer(folder / name, MegatronSettings(layout, micro_batch_tokens=64, eps=EPS, **further))


def state(trainer):
    return {f"{source.stem}.{source.name}": whole(source) for source in trainer._own.sources()}


def share(step, layout, rank, ranks):
    rows = rows_of(step)
    owners = balanced([float(len(row.tokens)) for row in rows], ranks // layout.model)
    replica = layout.replica(rank, ranks)
    return [row for row, owner in zip(rows, owners, strict=True) if owner == replica]


def compared(folder, name, layout):
    """Published weights and gradients, with the layer and, of the trunk, without it."""
    trainer = opened(folder, name, layout, mtp_weight=WEIGHT)
    with trainer.placed():
        rows = trainer.with_gradient(rows_of(0), loss_of(objective(0)))
        found = {f"gradient.{key}": one for key, one in gradient(trainer, rows).items()}
        published = [*trainer._weights(), *trainer._further.published(trainer._weights(), torch.float32)]
        found |= {f"weight.{source.name}": whole(source) for source in published}
    trainer = opened(folder, name, layout)
    with trainer.placed():
        rows = trainer.with_gradient(rows_of(0), loss_of(objective(0)))
        return found | {f"alone.{key}": one for key, one in gradient(trainer, rows).items()}


def trained(folder, case, layout, rank, ranks):
    """Steps with the layer, and where gradients are whole also without; the last one from a checkpoint."""
    found, own = {}, {"router_bias_rate": RATE, "recompute": case == "pipeline"}
    for kind, weight in (("ahead", WEIGHT), ("alone", 0.0))[: 2 if case in GRADIENTS else 1]:
        trainer, place = opened(folder, TRAINED, layout, mtp_weight=weight, **own), folder / f"{kind}-{case}"
        for step in range(STEPS):
            if step == STEPS - 1:
                place.mkdir(exist_ok=True)
                save(trainer, place)
                dist.barrier()
                trainer = opened(folder, TRAINED, layout, mtp_weight=weight, **own)
                trainer.load(place)
            figures = trainer.step(share(step, layout, rank, ranks), objective(step))
            for name in figures.keys() & {"loss", "grad_norm", "mtp_loss"}:
                found[f"{kind}.figures.{name}.{step}"] = torch.tensor(figures[name], dtype=torch.float64)
        with trainer.placed():
            found |= {f"{kind}.{name}": one for name, one in state(trainer).items()}
            found |= {f"{kind}.after.{name}": one for name, one in weights(trainer).items()}
    if rank == 0:
        save_file(found, folder / f"trained-{case}.safetensors")
    dist.barrier()


def run(rank, folder):
    for case, (ranks, layout) in CASES.items():
        if rank >= ranks:
            continue
        with megatron_ranks(folder / f"store-{case}", rank, ranks, deadline_s=290):
            for name in FAMILIES if case in GRADIENTS else ():
                found = compared(folder, name, layout)
                if rank == 0:
                    save_file(found, folder / f"{name}-{case}.safetensors")
            trained(folder, case, layout, rank, ranks)


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]))
