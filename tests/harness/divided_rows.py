"""One of several processes that share the tokens of rows: `python -m tests.harness.divided_rows RANK RANKS FOLDER`.

Rank 0 leaves the gradient of each model, as `MODEL-RANKS.safetensors`, and of the last one the weights after a step.
"""

import faulthandler
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from asyncrl.data.model_dir import ModelError
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from tests.harness.rank_cases import gradient, rows_of, share
from tests.harness.training import copies, policy

SETTINGS = {
    "dense": {},
    "offloaded": {"offload_activations": True},
    "glm-4.7-flash": {},
    "minimax-m2": {},
}
"""By name of the model."""
REFUSED = {
    "olmo-3": "Olmo3Attention with a sliding window",
    "qwen3.5": "Qwen3_5GatedDeltaNet",
    "gpt-oss": "GptOssAttention with a sliding window",
    "deepseek-v3.2": "DeepseekV32Attention",
}
"""By name of the model: the layers whose tokens cannot be shared."""


def run(rank, ranks, folder):
    """Compute the gradient of each model, and a step."""
    store = dist.FileStore(str(folder / f"store{ranks}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=290))
    for name, settings in SETTINGS.items():
        trainer = TorchTrainer(folder / name, TorchSettings(context=2, **settings))
        own = share(rows_of(False), rank // 2, ranks // 2)
        found = gradient(trainer, own, 3)
        length = longest(trainer, own)
        if rank == 0:
            save_file(found, folder / f"{name}-{ranks}.safetensors")
            print(name, length, max(len(row.tokens) for row in own))
    trainer.step(own, policy())
    save_file(copies(trainer), folder / f"stepped{ranks}-{rank}.safetensors")
    for name in REFUSED:
        try:
            TorchTrainer(folder / name, TorchSettings(context=2))
        except ModelError as error:
            if rank == 0:
                print(error)
    dist.barrier()
    dist.destroy_process_group()


def longest(trainer, rows):
    """Tokens of the hidden states that this rank has of the longest row."""
    lengths = []
    layer = trainer._policy.model.model.layers[0]
    hook = layer.register_forward_hook(lambda _module, given, _made: lengths.append(given[0].shape[1]))
    trainer._passes.column(trainer._policy, sorted(rows, key=lambda row: -len(row.tokens))[:1])
    hook.remove()
    return max(lengths)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(290)  # says where a rank hangs, before the test gives up
    torch.set_num_threads(1)
    run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
