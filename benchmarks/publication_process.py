"""A process of `asyncrl bench publication`: `python -m benchmarks.publication_process FOLDER GIVEN`, GIVEN as JSON.

The first rank writes its figures to FOLDER/figures.json.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from asyncrl.training.checkpoint import Checkpoint
from asyncrl.training.publisher import Member, Publisher, choice_of
from asyncrl.training.ranks import join_ranks
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from asyncrl.weights.files.store import FileStore
from asyncrl.weights.rank_shards import Attempt
from benchmarks.learner_process import train_row
from benchmarks.random_model import SHAPES, write_random_model
from topics.batches import Objective

_WARM = 1  # rounds that are not counted


class Given(msgspec.Struct, frozen=True):
    """The settings of a measurement."""

    shape: str  # a name in `SHAPES`
    device: str  # "cpu", "cuda" or "cuda:N"
    rounds: int  # of each kind, after one that is not counted; figures are medians
    size: Sequence[int]  # rows of a step, and tokens of each
    checkpoints: int  # number of checkpoints, counted like `rounds`; 0 for none
    rank: int = 0
    ranks: int = 1


class Peers:
    """The peers of a single rank: none exist."""

    def agree(self, one: bool) -> bool:
        """Return whether `one` is true on all ranks."""
        return one

    def gathered(self, share: Any) -> list[Any]:
        """Return the shares of all ranks, once all ranks have sent them."""
        return [share]


class _Group(Peers):
    """Several ranks; the threads that write have a separate process group."""

    def __init__(self, given: Given, root: Path) -> None:
        join_ranks(root / "ranks", given.rank, given.ranks, given.device)
        self._ranks = given.ranks
        self._steps, self._writes = (dist.new_group(backend="gloo") for _ in range(2))

    def agree(self, one: bool) -> bool:
        """See `Peers.agree`."""
        return all(self._all(one, self._steps))

    def gathered(self, share: Any) -> list[Any]:
        """See `Peers.gathered`."""
        return self._all(share, self._writes)

    def _all(self, one: Any, group: Any) -> list[Any]:
        found: list[Any] = [None] * self._ranks
        dist.all_gather_object(found, one, group=group)
        return found


def measured(root: Path, given: Given) -> dict[str, float]:
    """Return the figures of one rank."""
    bench = Bench(root, given)
    figures = bench.publications(given.rounds)
    if given.checkpoints:
        figures |= bench.checkpoints(given.checkpoints, figures["step_s"])
    return figures


class Bench:
    """A trainer that runs alone or as one of several ranks."""

    def __init__(self, root: Path, given: Given) -> None:
        rows, tokens = given.size
        self._root = root
        self._first = given.rank == 0
        self._peers: Peers = _Group(given, root) if given.ranks > 1 else Peers()
        if self._first:
            write_random_model(root / "model", SHAPES[given.shape], context=tokens)
        self._peers.gathered(None)
        settings = TorchSettings(device=given.device, dtype="bfloat16", micro_batch_tokens=tokens, recompute=False)
        self._trainer = TorchTrainer(root / "model", settings)
        self._peers.gathered(None)
        for path in (root / "model").glob("*.safetensors*") if self._first else ():
            path.unlink()  # free the space for later files
        self._store = FileStore(root / "weights")
        member = Member(given.rank, given.ranks)
        self._publisher = Publisher(self._trainer, store=self._store, checkpoints=root / "checkpoints", member=member)
        every = [train_row(number, tokens, SHAPES[given.shape].vocabulary) for number in range(rows)]
        self._rows = every[given.rank :: given.ranks]
        self._steps = 0
        self._pool = ThreadPoolExecutor(1)

    def publications(self, rounds: int) -> dict[str, float]:
        """Measure steps alone, then steps with a publication each."""
        self._step()
        self._publisher.copy_weights()  # allocates its memory
        self._publish(0, 0.0)
        alone = [self._timed(self._step) for _ in range(rounds + _WARM)][_WARM:]
        copies, periods, announced = [], [], []
        publishing: Future[float] | None = None
        for _ in range(rounds + _WARM + 1):
            began = time.monotonic()
            self._step()
            ended = time.monotonic()
            if publishing is not None:
                announced.append(publishing.result())
            self._publisher.copy_weights()
            copies.append(time.monotonic() - ended)
            publishing = self._pool.submit(self._publish, self._steps, ended)
            periods.append(time.monotonic() - began)
        step_s = statistics.median(alone)
        assert publishing is not None
        announced.append(publishing.result())
        return {
            "step_s": step_s,
            "publication_copy_s": statistics.median(copies[_WARM:]),
            # The first of these periods has no publication.
            "publication_standstill_s": statistics.median(periods[_WARM + 1 :]) - step_s,
            "publication_announced_s": statistics.median(announced[_WARM:]),
            "weights_gb": _size(self._root / "weights") / 1e9,
        }

    def checkpoints(self, rounds: int, step_s: float) -> dict[str, float]:
        """Measure checkpoints, one after the other, during steps."""
        self._clear("weights")  # free the space for later files
        copies, stood, saved = [], [], []
        for _ in range(rounds + _WARM):
            self._clear("checkpoints")
            self._step()
            ended = time.monotonic()
            self._publisher.copy_state()
            copies.append(time.monotonic() - ended)
            saving = self._pool.submit(self._save, self._steps, ended)
            self._step()
            stood.append(time.monotonic() - ended - step_s)
            while not self._peers.agree(saving.done()):
                self._step()
            saved.append(saving.result())
        return {
            "checkpoint_copy_s": statistics.median(copies[_WARM:]),
            "checkpoint_standstill_s": statistics.median(stood[_WARM:]),
            "checkpoint_saved_s": statistics.median(saved[_WARM:]),
            "checkpoint_gb": _size(self._root / "checkpoints") / 1e9,
        }

    def _step(self) -> None:
        self._steps += 1
        self._trainer.step(self._rows, Objective(learning_rate=1e-6))

    def _timed(self, work: Callable[[], object]) -> float:
        began = time.monotonic()
        work()
        return time.monotonic() - began

    def _publish(self, version: int, ended: float) -> float:
        """Return seconds from the end of a step to the moment at which its version may be announced."""
        attempt = Attempt(0, version, f"{version:016x}")
        choice = choice_of([self._publisher.prepare(version)], "")
        shares = self._peers.gathered(self._publisher.write_version(attempt, choice))
        if not self._first:
            return 0.0
        made = self._publisher.complete_version(attempt, choice, shares)
        took = time.monotonic() - ended
        self._store.prune({Path(made.location).name}, (0, version))
        return took

    def _save(self, step: int, ended: float) -> float:
        checkpoint = Checkpoint(0, step, f"{step:032d}", step)
        shares = self._peers.gathered(self._publisher.write_checkpoint(checkpoint))
        if self._first:
            self._publisher.complete_checkpoint(checkpoint, shares)
        return time.monotonic() - ended

    def _clear(self, name: str) -> None:
        if self._first:
            shutil.rmtree(self._root / name, ignore_errors=True)
        self._peers.gathered(None)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


if __name__ == "__main__":
    folder, given = Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Given)
    found = measured(folder, given)
    if given.rank == 0:
        (folder / "figures.json").write_bytes(msgspec.json.encode(found))
