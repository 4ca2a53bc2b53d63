"""Training whose parameters are sharded over ranks gives the results of one rank."""

import numpy as np
import pytest
import torch

from asyncrl.training.torch.trainer import TorchTrainer
from harness.mixtures import MIXTURE, write_transformers_model
from harness.ranks import run_ranks
from harness.training import copies, of_all_ranks, policy, policy_rows, save

SHARDED = """
import faulthandler, sys
from datetime import timedelta
from pathlib import Path
import numpy as np, torch, torch.distributed as dist
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from asyncrl.weights.shared import unpack_tensors
from tests.harness.training import policy, policy_rows, copies, save
from torch.distributed.tensor import DTensor
from safetensors.torch import load_file, save_file
rank, ranks, model, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
faulthandler.dump_traceback_later(290)  # says where a rank hangs, before the test gives up
store = dist.FileStore(str(out / "store"), ranks)
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=290))
trainer = TorchTrainer(model)
assert all(isinstance(parameter, DTensor) for parameter in trainer._policy.parameters())
batches = [policy_rows(np.random.default_rng(seed), 24) for seed in (1, 2)]
share = (slice(0, 3), slice(3, 24))[rank]
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
save_file(weights, out / f"weights-{rank}.safetensors")
copy = TorchTrainer(model, TorchSettings(shares=True)).copy_weights()
parts = [None] * ranks
dist.all_gather_object(parts, copy.shared())
if rank == 0:
    mapped = dict(one for of_rank in parts for call in of_rank for one in unpack_tensors(call))
    on_disk = load_file(model / "model.safetensors")
    assert mapped.keys() == on_disk.keys()
    assert all(torch.equal(mapped[name], one) for name, one in on_disk.items())
    own, all_of = copy._memory.nbytes, sum(one.nbytes for one in on_disk.values())
    assert own < 0.8 * all_of or ranks == 1  # no rank has what others write
written = [one.name.split(".experts.") for held in copy.files().values() for one in held]
experts = {int(name[1].partition(".")[0]) for name in written if len(name) > 1}
half = trainer._policy.mixture.experts // ranks if experts else 0
assert experts <= {*range(rank * half, (rank + 1) * half)}  # each stays where FSDP2 has it
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_sharded_training_equals_plain_training(model, tmp_path, kind):
    if kind == "experts":
        write_transformers_model(model := tmp_path / "mixture", "qwen3_moe", MIXTURE)
    trainer = TorchTrainer(model)
    output = run_ranks(SHARDED, 2, model, tmp_path)

    for seed in (1, 2):
        expected = trainer.step(policy_rows(np.random.default_rng(seed), 24), policy())
    found = [float(value) for value in output.split()]
    assert found == pytest.approx([expected[key] for key in ("loss", "grad_norm", "ess", "ratio_max")], rel=1e-3)
    sharded = of_all_ranks(tmp_path, "weights")
    for name, tensor in copies(trainer).items():
        assert torch.allclose(sharded[name], tensor, atol=2e-4), name


MIDDLE = """
import sys
from datetime import timedelta
from pathlib import Path
import numpy as np, torch.distributed as dist
from asyncrl.training.torch.trainer import TorchTrainer
from tests.harness.training import policy, policy_rows, save
rank, ranks, model, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
store = dist.FileStore(str(out / "store"), ranks)
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=290))
trainer = TorchTrainer(model)
trainer.load(out / "first")
trainer.step(policy_rows(np.random.default_rng(2), 24)[rank::ranks], policy())
if rank == 0:
    (out / "second").mkdir()
dist.barrier()
save(trainer, out / "second")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_steps_on_one_rank_on_two_and_on_one_again_are_those_of_one(model, tmp_path):
    batches = [policy_rows(np.random.default_rng(seed), 24) for seed in (1, 2, 3)]
    alone, first, last = (TorchTrainer(model) for _ in range(3))
    expected = [alone.step(rows, policy()) for rows in batches][-1]
    first.step(batches[0], policy())
    (tmp_path / "first").mkdir()
    save(first, tmp_path / "first")
    run_ranks(MIDDLE, 2, model, tmp_path)
    last.load(tmp_path / "second")
    found = last.step(batches[2], policy())

    assert {name: found[name] for name in ("loss", "grad_norm", "ess")} == pytest.approx(
        {name: expected[name] for name in ("loss", "grad_norm", "ess")}, rel=1e-5
    )
    weights, others = copies(alone), copies(last)
    apart = torch.nn.utils.get_total_norm([weights[name] - others[name] for name in weights])
    assert apart / torch.nn.utils.get_total_norm(weights.values()) < 1e-6
