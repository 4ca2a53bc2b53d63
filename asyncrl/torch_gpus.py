"""The GPUs that torch finds, asked in a separate process: torch takes seconds and 200 MB to load."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from asyncrl.process import python

_LIMIT_S = 300
_COUNT = "import torch; print(torch.cuda.device_count(), torch.__version__)"


def gpus_of_torch(environment: Mapping[str, str]) -> tuple[int | None, str]:
    """Return the number of GPUs that torch finds and its version; None and the reason if torch cannot be asked."""
    count, _, version = (answer := last_line_of(_COUNT, environment)).partition(" ")
    return (int(count), version) if count.isdecimal() else (None, answer)


def last_line_of(code: str, environment: Mapping[str, str]) -> str:
    """The last line that a few lines of Python print, with some further environment variables."""
    command, variables = python("-c", code), {**os.environ, **environment}
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {_LIMIT_S} s"
    return (done.stdout.strip() or done.stderr.strip() or "no answer").splitlines()[-1]
