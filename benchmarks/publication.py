"""Standstill of the learner for a publication and a checkpoint, and the time until both are complete.

No server takes part; the learner's trainer makes the steps, copies and files.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.clone import ROOT, environment
from benchmarks.publication_process import Given, measured

_LIMIT_S = 1800.0  # for all ranks of a measurement


def bench_publication(*, ranks: int, **options: Any) -> dict[str, float]:
    """Measure steps alone, steps with a publication each, and checkpoints during steps.

    Args:
        ranks: number of ranks of a second measurement; 1 for none.
        options: fields of `Given`, and `directory`: a folder on the disk to measure, "" for a temporary one.

    Returns:
        Seconds; names begin with the shape and, for several ranks, their number.

    Raises:
        RuntimeError: a rank failed; its error is on standard error.
    """
    directory = options.pop("directory") or None
    given = Given(**options)
    name = given.shape.replace(".", "_")
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", dir=directory) as scratch:
        figures = {f"{name}_{key}": value for key, value in measured(Path(scratch), given).items()}
    if ranks > 1:
        with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", dir=directory) as scratch:
            found = _measured_by(Path(scratch), given, ranks)
        figures |= {f"{name}_{ranks}_ranks_{key}": value for key, value in found.items()}
    return figures


def _measured_by(folder: Path, given: Given, ranks: int) -> dict[str, float]:
    """Measure with several ranks, each in a separate process."""
    # The ranks connect through the loopback, even if this machine's name resolves to another address.
    variables = environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    processes = []
    for rank in range(ranks):
        own = msgspec.json.encode(msgspec.structs.replace(given, rank=rank, ranks=ranks)).decode()
        words = [sys.executable, "-m", "benchmarks.publication_process", str(folder), own]
        processes.append(subprocess.Popen(words, env=variables, cwd=ROOT))
    try:
        codes = [process.wait(_LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError(f"ranks of the publication ended with {codes}; their errors are above")
    return msgspec.json.decode((folder / "figures.json").read_bytes(), type=dict[str, float])
