"""Ranks of a trainer group: their rendezvous, and the rows that each of them trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


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


def shares(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each trajectory: the largest first, each to the rank that has least.

    Args:
        sizes: of the trajectories, in the order of the batch.
    """
    loads, found = [0] * ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[rank] += sizes[index]
        found[index] = rank
    return found
