"""Rows whose preparation sleeps, for `asyncrl bench preparation`."""

from __future__ import annotations


class _Rows:
    def __init__(self, setup_s: float) -> None:
        self._setup = ["sleep", f"{setup_s:g}"]

    def row(self, index: int) -> dict[str, object]:
        """Return a row, whose test passes with any file of the policy."""
        limit_s = 10 * float(self._setup[1]) + 60.0
        metadata = {"setup": self._setup, "setup_limit_s": limit_s, "tests": {"written": ["test", "-s", "f"]}}
        return {"prompt": "^ab=", "label": str(index), "metadata": metadata}


def rows(seed: int, setup_s: float) -> _Rows:
    """Return the rows of a run.

    Args:
        setup_s: seconds that the setup of each row sleeps.
    """
    return _Rows(setup_s)
