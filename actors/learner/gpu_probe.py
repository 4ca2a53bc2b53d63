"""The first use of a GPU: by a rank, or to check whether a missing GPU works again.

`python -m actors.learner.gpu_probe DEVICE` uses a GPU and ends; it prints the error if the GPU does not work.
"""

from __future__ import annotations

import sys

from actors.learner.rank import Call, Rank
from asyncrl.training.ranks import GpuFull, NoGpu, take_gpu


class TakeGpu(Call[None]):
    """Take the GPU, before anything waits for another rank.

    Raises:
        NoGpu, GpuFull: it cannot be used.
    """

    on_gpu = True

    def _compute(self, rank: Rank) -> None:
        rank.take_gpu()


def main() -> None:
    """Use the GPU."""
    try:
        take_gpu(sys.argv[1], rank=0, ranks=1)
    except (NoGpu, GpuFull) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
