"""Groups of ranks that end with what they were formed for."""

import gc
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state


@contextmanager
def megatron_ranks(store, rank, ranks, *, deadline_s):
    """Let this process be a rank of so many; the groups of their layouts end with it.

    Each group of gloo has threads, and a rank is in a dozen: those of twenty layouts take most of two cores.
    """
    found = dist.FileStore(str(store), ranks)
    deadline = timedelta(seconds=deadline_s)
    dist.init_process_group("gloo", store=found, rank=rank, world_size=ranks, timeout=deadline)
    torch.compiler.set_stance("force_eager")  # each rank would compile small functions of the library in each group
    yield
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    # Trainers name the groups, in circles, some of which only show when others are gone. Threads end with the last
    # name of their group: here, where nobody computes.
    while gc.collect():
        pass
