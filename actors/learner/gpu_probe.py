"""Checks whether a missing GPU works again.

`python -m actors.learner.gpu_probe DEVICE` uses a GPU and ends; it prints the error if the GPU does not work.
"""

from __future__ import annotations

import sys

from asyncrl.training.ranks import GpuFull, NoGpu, take_gpu


def main() -> None:
    """Use the GPU."""
    try:
        take_gpu(sys.argv[1], rank=0, ranks=1)
    except (NoGpu, GpuFull) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
