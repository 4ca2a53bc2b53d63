"""Three steps of trainers on GPUs of their own, each with a rest behind it, and the same by one process on the CPU.

`python -m harness.gpu_cases RANK CASE DEVICE FOLDER` is a rank; the models of `write_models` are in the folder.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from asyncrl.process import die_with
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.megatron.settings import MegatronSettings
from asyncrl.training.megatron.trainer import MegatronTrainer
from asyncrl.training.ranks import join_ranks
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from harness.megatron_cases import objective, roles_objective, share
from harness.mixtures import MIXTURE, SMALL, routed_rows, write_transformers_model
from harness.training import host_tensor, policy_rows

ROOT = Path(__file__).parents[2]
STEPS, ROWS = 3, 12
_DEADLINE_S = 300


class Case(NamedTuple):
    """A trainer, and what it trains."""

    ranks: int
    layout: Layout | None = None  # of megatron-core; None for the torch trainer
    mixture: bool = False  # a model with experts, to which tokens go as they went when they were sampled
    critic: bool = False  # and a teacher; policy and critic leave the device while the other one learns


CASES = {
    "torch-critic": Case(1, critic=True),
    "torch-sharded": Case(2),
    "torch-sharded-critic": Case(2, critic=True),
    "critic": Case(1, Layout(), critic=True),
    "stages-critic": Case(2, Layout(pipeline=2), critic=True),
    "head": Case(2, Layout(pipeline=2, head=2)),
    "head-tensor": Case(4, Layout(tensor=2, pipeline=2, head=2)),
    "divided-experts": Case(2, Layout(tensor=2, expert_tensor=2), mixture=True),
    "data-experts": Case(4, Layout(tensor=2, expert=2, expert_tensor=2), mixture=True),
}
_EVEN = {"moe_intermediate_size": 48}  # rows of half an expert begin where kernels of GPUs can read them: 16 bytes


def write_models(folder):
    """Models of all cases."""
    for name in ("qwen3", "qwen2", "llama"):
        write_transformers_model(folder / name, *SMALL[name])
    write_transformers_model(folder / "qwen3-moe", "qwen3_moe", MIXTURE | _EVEN)


def opened(case, device, folder, *, whole=False):
    """A trainer; `whole` for the torch trainer of one process."""
    on_gpu = device == "cuda"
    how = {"device": device, "dtype": "bfloat16" if on_gpu else "float32", "micro_batch_tokens": 64, "eps": 1e-3}
    how |= {"replays": case.mixture}
    if case.critic:
        how |= {"teacher": folder / "qwen2", "critic": folder / "llama", "offloads": True}
    model = folder / ("qwen3-moe" if case.mixture else "qwen3")
    if case.layout is None or whole:
        return TorchTrainer(model, TorchSettings(**how))
    return MegatronTrainer(model, MegatronSettings(layout=case.layout, **how))


def rows_of(case, step):
    rows = policy_rows(np.random.default_rng(step), ROWS)
    if case.critic:
        rows = [dataclasses.replace(row, estimator="gae") for row in rows]
    return routed_rows(rows, step) if case.mixture else rows


def trained(trainer, case, rank=0, ranks=1):
    """Figures of each step, and all that was moved."""
    figures = []
    for step in range(STEPS):
        rows = rows_of(case, step)
        if ranks > 1:
            rows = rows[rank::ranks] if case.layout is None else share(rows, case.layout, rank, ranks)
        figures.append(trainer.step(rows, roles_objective(step) if case.critic else objective(step)))
        assert trainer.rest().bytes > 0
    held = trainer.copy_state().files().items()  # of policy and critic by the same names, in other files
    state = {(stem.partition("-rank")[0], one.name): host_tensor(one).clone() for stem, own in held for one in own}
    return figures, {f"{stem}:{name}": one for (stem, name), one in state.items() if name != "rng"}


def by_one_process(name, folder):
    """Return what the torch trainer makes of it in float32 on the CPU."""
    return trained(opened(CASES[name], "cpu", folder, whole=True), CASES[name])


def by_ranks(name, device, folder):
    """Return what the ranks of a case make of it, in processes of their own."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])  # with packages that this process was given
    with_path = {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    words = [sys.executable, "-m", "harness.gpu_cases"]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), name, device, str(folder)],
            cwd=ROOT,
            env=os.environ | with_path,
            stderr=(folder / f"{name}-{rank}.error").open("w"),
        )
        for rank in range(CASES[name].ranks)
    ]
    try:
        codes = [rank.wait(_DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
    said = {rank: (folder / f"{name}-{rank}.error").read_text()[-3000:] for rank, code in enumerate(codes) if code}
    assert not said, said
    parts = [load_file(folder / f"{name}-{rank}.safetensors") for rank in range(len(ranks))]
    return json.loads((folder / f"{name}.json").read_text()), {key: one for part in parts for key, one in part.items()}


def main():
    die_with(os.getppid())
    rank, name, device, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    case = CASES[name]
    if case.ranks > 1:
        join_ranks(folder / f"{name}.store", rank, case.ranks, device)
    figures, state = trained(opened(case, device, folder), case, rank, case.ranks)
    save_file(state, folder / f"{name}-{rank}.safetensors")
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(figures))
    if case.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
