"""Published sizes as models of megatron-core on the device meta: `python -m tests.harness.megatron_sizes FOLDER...`.

Each FOLDER has a `config.json`. It is an error where a tensor of the table has no place of its size in the model, or a
parameter of the model none in the table.
"""

import math
import sys
from pathlib import Path

import msgspec
import torch

from asyncrl.training.megatron.families import read_family
from asyncrl.training.megatron.mcore_patches import around, join, prepare
from asyncrl.training.megatron.modules import build
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.megatron.sharded_params import Parts


def compare(folder):
    family, shape = read_family(folder)
    shape = msgspec.structs.replace(shape, ahead=shape.further_layers > 0)
    with torch.device("meta"):
        [chunk] = build(family, shape, Layout())
    held = dict.fromkeys((parameter for parameter in chunk.parameters()), 0)
    corrections = {name for name, _ in chunk.named_buffers() if name.endswith("expert_bias")}
    for place in Parts([chunk], family, shape, Layout()).places:
        part = place.rule.part(place.parameter, shape)
        assert part.numel() == math.prod(place.shape), (place.name, part.shape, place.shape)
        if place.rule.trained:
            held[place.parameter] += part.numel()
        else:
            corrections.remove(place.rule.parameter)
    assert not corrections, corrections
    for name, parameter in chunk.named_parameters():
        assert held[parameter] == parameter.numel(), (name, held[parameter], parameter.shape)


if __name__ == "__main__":
    device = torch.device("cpu")
    prepare(device)
    with around(device):
        join(Layout())
        for argument in sys.argv[1:]:
            compare(Path(argument))
