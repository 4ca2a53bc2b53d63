"""The experts of a layer under their names on disk."""

import weakref

import torch

from asyncrl.training.disk_names import _Fused, _Part, parts_of

EXPERTS = 4, 6, 3


class Sharded:
    """A layer's experts that no rank has whole."""

    shape = EXPERTS

    def __init__(self):
        self.gathered = 0
        self.whole = torch.randn(EXPERTS)
        self.held = weakref.WeakSet()  # gathered, and not given back

    def full_tensor(self):
        self.gathered += 1
        found = self.whole.clone()
        self.held.add(found)
        return found


def test_experts_that_are_gathered_are_given_back_before_those_of_the_next_layer():
    indices = parts_of("model.layers.0.mlp.experts.gate_up_proj", EXPERTS).values()
    layers = [Sharded() for _ in range(3)]
    for count in (1, 2):  # a second copy gathers again
        for layer in layers:
            fused = _Fused(layer, len(indices))
            parts = [_Part(fused, index) for index in indices]
            assert all(
                torch.equal(part.whole(), layer.whole[index]) for part, index in zip(parts, indices, strict=True)
            )
            assert layer.gathered == count
            assert not layer.held, "the whole stays as long as the parts do"
    assert len(indices) == 2 * EXPERTS[0]
