"""A package in the place of reasoning-gym, whose data sets are slow or fail in every way."""

from pathlib import Path

import pytest

_FACTORY = """
import dataclasses, os, signal, time

@dataclasses.dataclass
class Config:
    seed: int = 0
    size: int = 0
    seconds: float = 0.0

class Dataset:
    def __init__(self, how, seconds):
        self.how, self.seconds = how, seconds

    def __getitem__(self, place):
        print("printed by a data set", flush=True)
        ends = time.monotonic() + self.seconds
        while time.monotonic() < ends or (self.how == "hangs" and place == 2) or self.waits(place):
            pass  # as Python code does that computes: nobody else gets the lock for long
        if place == 2 and self.how == "raises":
            raise KeyError("no such board")
        if place == 2 and self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return {"question": f"^{place}=", "answer": str(place), "metadata": {}}

    def waits(self, place):
        return self.how == "waits" and not os.path.exists(f"{os.path.dirname(__file__)}/row-{place}")

DATASETS = {name: (Dataset, Config) for name in ("slow", "waits", "raises", "hangs", "dies")}

def create_dataset(name, seed, size, seconds=0.0):
    return Dataset(name, seconds)
"""


def put_in_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process and those that it starts find the package."""
    package = folder / "packages" / "reasoning_gym"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "factory.py").write_text(_FACTORY)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


def let_make(folder: Path, row: int) -> None:
    """Let the data set "waits" make a row."""
    (folder / "packages" / "reasoning_gym" / f"row-{row}").touch()
