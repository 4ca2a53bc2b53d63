"""Random numbers as `torch.manual_seed` begins them on a CPU, without loading torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_BLOCK = 16  # numbers that torch turns from uniform to normal at once


class TorchRandom:
    """The generator of torch on a CPU: the Mersenne Twister of 32 bits."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.RandomState(seed & 0xFFFFFFFF)

    def uniform(self, count: int) -> Floats:
        """Return `Tensor.uniform_()` of `count` float32 numbers: multiples of 2^-24 in [0, 1)."""
        return self._bits.randint(0, 1 << 32, count, np.uint32) % (1 << 24) / float(1 << 24)

    def normal(self, count: int) -> Floats:
        """Return `Tensor.normal_()` of `count` float32 numbers, up to their rounding; from 16 on, as torch does.

        Source: Box and Muller, Annals of Mathematical Statistics 29 (1958).
        """
        values, whole = self.uniform(max(count, _BLOCK)), count // _BLOCK * _BLOCK
        values[:whole] = _box_muller(values[:whole])
        if whole < count:
            values[-_BLOCK:] = _box_muller(self.uniform(_BLOCK))  # torch draws the last block anew
        return values[:count]


def _box_muller(uniform: Floats) -> Floats:
    """Turn blocks of 16 uniform numbers into normal ones: 8 radii, then their 8 angles."""
    radii, angles = np.moveaxis(uniform.reshape(-1, 2, _BLOCK // 2), 1, 0)
    radii, angles = np.sqrt(-2 * np.log1p(-radii)), 2 * np.pi * angles
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1).ravel()
