"""Ranks of a trainer group: their rendezvous, and the trajectories that each of them trains."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.algorithms.balance import Work, balanced
from asyncrl.data.model_dir import expert_count, read_json, tensor_shapes
from asyncrl.errors import AsyncRLError
from topics.batches import BatchGroup, BatchMember, BatchPacked

_BYTES_PER_TOKEN = 13  # of the arrays of a `Segment`, by which members without lengths are measured


class NoGpu(AsyncRLError):
    """A GPU that is not there, or that does not work."""


def take_gpu(device: str, rank: int, ranks: int) -> None:
    """Use the GPU of a rank for the first time, alone: what fails here is the GPU, and not what runs on it.

    Args:
        device: of the trainer; on GPUs each of several ranks takes the one of its number.

    Raises:
        NoGpu: it is not there, or does not work.
        GpuFull: it has no room for anything.
    """
    if not device.startswith("cuda"):
        return
    import torch

    index = rank if ranks > 1 else torch.device(device).index or 0
    count = torch.cuda.device_count()
    if index >= count:
        raise NoGpu(
            f"rank {rank} has no GPU: found {count} GPUs here (CUDA_VISIBLE_DEVICES = "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}), expected {index + 1} at least; see "
            "`nvidia-smi -L`, replace the GPU, or lower learner.ranks"
        )
    with named_where_full(rank):
        try:
            torch.zeros(1, device=f"cuda:{index}").cpu()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first = str(error).strip().splitlines()[0]
            raise NoGpu(
                f"the GPU of rank {rank} (GPU {index}) does not work: {first}; see `nvidia-smi -q -d ECC` and "
                "`dmesg`, reset or replace it"
            ) from error


def join_ranks(rendezvous: Path, rank: int, ranks: int, device: str) -> None:
    """Join the process group of a trainer; returns once all ranks are there.

    Args:
        rendezvous: a file that all of them reach, new for each group.
        device: of the trainer; on GPUs each rank takes the one of its number.
    """
    import torch
    import torch.distributed as dist

    if device.startswith("cuda"):
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(rendezvous), ranks)  # type: ignore[attr-defined]
    backend = "nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def limit_memory(device: str, fraction: float) -> None:
    """Let this process take a part of the memory of its GPU at most: beyond it allocations fail, as on a full one."""
    import torch

    torch.cuda.set_per_process_memory_fraction(fraction, torch.device(device))


class GpuFull(AsyncRLError):
    """A GPU that has no room for a model: others use it, or it is too small."""


@contextmanager
def named_where_full(rank: int) -> Iterator[None]:
    """Say what a model finds that does not fit on the GPU of its rank.

    Raises:
        GpuFull: it does not.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which a trainer without it does not load
            raise
        raise GpuFull(
            f"the GPU of rank {rank} has no room for the model: {error}; end what else runs there (nvidia-smi names "
            "it), or give the learner more GPUs: learner.ranks, learner.layout"
        ) from error


def work_of(model: Path) -> Work:
    """The operations of a model, from its configuration and the shapes of its weights."""
    config = read_json(model / "config.json")
    shapes = tensor_shapes(model)
    sizes = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) > 1}
    if experts := expert_count(config):  # those that were not chosen do nothing for a token
        chosen = int(config["num_experts_per_tok"])
        sizes = {name: size * chosen // experts if ".mlp.experts." in name else size for name, size in sizes.items()}
    embedding = next((size for name, size in sizes.items() if "embed_tokens" in name), 0)
    tied = not any("lm_head" in name for name in sizes)  # then the embedding projects to the vocabulary as well
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    attention = config["num_hidden_layers"] * config["num_attention_heads"] * size
    return Work(sum(sizes.values()) - (0 if tied else embedding), attention)


def shares(packed: BatchPacked, work: Work, ranks: int, *, whole_groups: bool = False) -> list[int]:
    """Return the rank of each trajectory, in the order in which the batch names them: balanced by their work.

    Args:
        whole_groups: one rank takes all of a group, and computes its prompt once.
    """
    if whole_groups:
        owners = balanced([_work_of_group(group, work) for group in packed.groups], ranks)
        return [owner for group, owner in zip(packed.groups, owners, strict=True) for _ in group.members]
    lengths = [_lengths(member) for group in packed.groups for member in group.members]
    return balanced([sum(map(work.of, of_member)) for of_member in lengths], ranks)


def work_of_batch(packed: BatchPacked, work: Work, *, shared: bool) -> float:
    """Return the operations of a batch.

    Args:
        shared: the rows of a group share the computation of their prompt.
    """
    if shared:
        return sum(_work_of_group(group, work) for group in packed.groups)
    return sum(work.of_rows([length]) for group in packed.groups for row in group.members for length in _lengths(row))


def _lengths(member: BatchMember) -> list[int]:
    return member.lengths or [member.payload.size // _BYTES_PER_TOKEN]


def _work_of_group(group: BatchGroup, work: Work) -> float:
    """Operations of a group: its rows share at least what comes before the first sampled token."""
    lengths = [length for member in group.members for length in _lengths(member)]
    prompt = min((max(_lengths(member)[0] - member.tokens, 0) for member in group.members), default=0)
    return work.of_rows(lengths, prompt) if lengths else 0.0
