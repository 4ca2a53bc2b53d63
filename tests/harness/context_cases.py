"""One of four processes that attend to documents whose tokens two or all of them share.

`python -m tests.harness.context_cases RANK FOLDER`: rank 0 prints how far results and gradients of all ranks are from
those of whole documents, by case.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.training.attention import Documents
from asyncrl.training.context_parallel.allgather_attention import segment_attention
from asyncrl.training.megatron.context import share_of
from asyncrl.training.megatron.mcore_patches import around, join, prepare
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.packing import Inputs

CASES = {
    "of several lengths": ([13, 30, 8], 0, 16),
    "of one length": ([27, 27], 2, 16),
    "alone": ([40], 1, 16),
    "with values of another size": ([40], 1, 8),
}
"""By name: lengths of documents, how many are alike, and channels of values; keys have 16."""


def documents_of(lengths, alike, device="cpu"):
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    positions = np.arange(sum(lengths)) - np.repeat(bounds[:-1], lengths)
    return Documents(
        torch.from_numpy(positions[None]).to(device),
        torch.from_numpy(bounds).to(device),
        1 << (max(lengths) - 1).bit_length(),
        tuple((1, length) for length in lengths),
        alike,
    )


def whole_attention(tensors, lengths):
    """Causal attention of each document."""
    cut = zip(*(torch.split(one, lengths) for one in tensors), strict=True)
    heads = ([one.transpose(0, 1)[None] for one in own] for own in cut)
    return torch.cat(
        [scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True)[0].transpose(0, 1) for own in heads]
    )


def apart(layout, lengths, alike, channels):
    """Greatest difference."""
    random, count = torch.Generator().manual_seed(0), sum(lengths)
    shapes = [(count, 4, 16), (count, 2, 16), (count, 2, channels), (count, 4, channels)]
    *tensors, weight = (torch.randn(shape, generator=random) for shape in shapes)
    whole = [one.clone().requires_grad_() for one in tensors]
    expected = whole_attention(whole, lengths)
    (expected * weight).sum().backward()

    documents = documents_of(lengths, alike)
    inputs = Inputs(torch.arange(count)[None], *(torch.arange(count) for _ in range(2)), torch.ones(count), documents)
    share = share_of(inputs, documents, layout)
    there = share.sources >= 0
    own = [torch.where(there[:, None, None], one[share.sources], 0) for one in (*tensors, weight)]
    given = [one.requires_grad_() for one in own[:3]]
    compiled = torch.compile(segment_attention, backend="aot_eager", fullgraph=True)
    found = compiled(*given, share.packed.segments)
    (found * own[3]).sum().backward()
    pairs = [(found, expected), *((one.grad, other.grad) for one, other in zip(given, whole, strict=True))]
    furthest = max((one[there] - other[share.sources[there]]).abs().max() for one, other in pairs)
    dist.all_reduce(furthest, dist.ReduceOp.MAX)
    return float(furthest)


def run(rank, folder):
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 4), rank=rank, world_size=4)
    device, found = torch.device("cpu"), {}
    prepare(device)
    for ranks in (2, 4):
        layout = Layout(context=ranks)
        with around(device):
            join(layout)
        for name, case in CASES.items():
            torch._dynamo.reset()  # graphs that also fit the sizes before take several times as long
            found[f"{name}, {ranks} ranks"] = apart(layout, *case)
    if rank == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]))
