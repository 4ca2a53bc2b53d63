"""One measurement of `asyncrl bench learner`: `python -m benchmarks.learner_process MEASUREMENT`, which is JSON.

The process prints its figures as a line of JSON after each kind of rows.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.balance import balanced
from asyncrl.algorithms.rows import TrainRow
from asyncrl.training.ranks import join_ranks, work_of
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from topics.batches import Objective

_WARM = 2  # steps that are not counted: the first compiles, the second still reserves memory
_MATRIX = {"cuda": 8192, "cpu": 1024}
LOGITS_AT_ONCE = 2048  # tokens of one product, in the bare loop
_OBJECTIVE = Objective(learning_rate=1e-6)


class Measurement(msgspec.Struct):
    """The settings of a measurement."""

    kind: str  # "asyncrl", "bare", or "masters": a bare loop with float32 masters
    model: str  # directory
    device: str  # "cpu" or "cuda"
    micro_batch_tokens: int  # tokens of a pass
    rounds: int  # steps of each kind, after two that are not counted; figures are medians
    lengths: dict[str, list[int]]  # of the rows of a step, by their name
    ranks: int = 1
    # repeats of the rows for the step that one rank and several ranks are compared on; 0: no comparison
    compared: int = 0
    options: dict[str, str] = {}
    rank: int = 0
    rendezvous: str = ""


class Rows(msgspec.Struct):
    """Figures of one kind of rows; times are of this rank."""

    lengths: list[int]  # of the rows of all ranks
    first_step_s: float
    step_s: float  # median
    peak_bytes: int  # of the device


class Measured(msgspec.Struct):
    """Figures of all kinds of rows."""

    matmul_flops: float = 0.0  # per second, of the largest matrices
    compared: dict[str, float] = {}  # figures of the compared step, which is the first step
    rows: dict[str, Rows] = {}
    export_s: float = 0.0  # until all weights are in host memory; 0 if not measured
    export_bytes: int = 0


class Steps(Protocol):
    """A trainer to measure."""

    def step(self, rows: Sequence[TrainRow], objective: Objective) -> dict[str, float]:
        """Make a step; return its figures."""
        ...


class Bare:
    """A training loop written by hand: all in one float type, rows padded, layers compiled."""

    def __init__(self, model: Path, device: str, micro_batch_tokens: int, *, exact: bool = False) -> None:
        """
        Args:
            exact: keep float32 masters of the weights, sum gradients and move weights in float32, as the trainer does.
        """
        torch.set_num_threads(TorchSettings().threads)  # as many threads as the trainer
        self._device, self._budget = device, micro_batch_tokens
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self._model = loaded.to(device).train()
        if device.startswith("cuda"):
            for layer in self._model.model.layers:
                layer.forward = torch.compile(layer.forward)
        self._rounded = list(self._model.parameters())
        self._moved = self._rounded
        if exact:
            self._moved = [torch.nn.Parameter(one.detach().float()) for one in self._rounded]
        self._optimizer = torch.optim.AdamW(self._moved, lr=1e-6, fused=True)

    def step(self, rows: Sequence[TrainRow], _: Objective) -> dict[str, float]:
        """See `Steps`."""
        lengths = [len(row.tokens) for row in rows]
        for batch in self._cut(lengths, self._budget):
            longest = max(lengths[index] for index in batch)
            tokens = np.zeros((len(batch), longest), np.int64)
            weights = np.zeros((len(batch), longest), np.float32)
            for place, index in enumerate(batch):
                tokens[place, : lengths[index]] = rows[index].tokens
                weights[place, : lengths[index]] = rows[index].weights * rows[index].advantages * rows[index].mask
            self._backward(torch.from_numpy(tokens).to(self._device), torch.from_numpy(weights).to(self._device))
            if self._moved is not self._rounded:
                self._sum()
        torch.nn.utils.clip_grad_norm_(self._moved, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._moved is not self._rounded:
            with torch.no_grad():
                torch._foreach_copy_(self._rounded, self._moved)
        return {}

    @staticmethod
    def _cut(lengths: list[int], budget: int) -> Iterator[list[int]]:
        """Return micro-batches of rows of similar length, whose padded size stays within a budget."""
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        while order:
            rows = max(budget // lengths[order[0]], 1)
            yield order[:rows]
            order = order[rows:]

    def _sum(self) -> None:
        """Add the gradients of a pass to those of the masters."""
        gradients = [one.grad for one in self._rounded]
        if self._moved[0].grad is None:
            for master, gradient in zip(self._moved, gradients, strict=True):
                master.grad = gradient.float()
        else:
            torch._foreach_add_([master.grad for master in self._moved], gradients)
        self._model.zero_grad()

    def _backward(self, tokens: torch.Tensor, weights: torch.Tensor) -> None:
        hidden = self._model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
        targets, weights = tokens[:, 1:].flatten(), weights[:, 1:].flatten()
        pieces = zip(*(torch.split(one, LOGITS_AT_ONCE) for one in (hidden, targets)), strict=True)
        logprobs = torch.cat([checkpoint(self._logprobs, *piece, use_reentrant=False) for piece in pieces])
        torch.autograd.backward(-(weights * logprobs).sum())

    def _logprobs(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return -cross_entropy(self._model.lm_head(hidden).float(), targets, reduction="none")


def measure(given: Measurement) -> None:
    """Measure and print."""
    if given.ranks > 1:
        join_ranks(Path(given.rendezvous), given.rank, given.ranks, given.device)
    steps, vocabulary = _steps(given)
    compared: dict[str, float] = {}
    if given.compared:
        lengths = next(iter(given.lengths.values())) * given.compared
        compared = steps.step(_own_rows(lengths, vocabulary, given), _OBJECTIVE)
    flops = matmul_flops(given.device)
    for name, lengths in given.lengths.items():
        found = timed_rows(steps, _own_rows(lengths * given.ranks, vocabulary, given), given)
        found.lengths = lengths * given.ranks
        print(msgspec.json.encode(Measured(flops, compared, {name: found})).decode(), flush=True)


def _own_rows(lengths: Sequence[int], vocabulary: int, given: Measurement) -> list[TrainRow]:
    """Return the rows of this rank."""
    rows = [train_row(number, length, vocabulary) for number, length in enumerate(lengths)]
    owners = balanced([work_of(Path(given.model)).of(length) for length in lengths], given.ranks)
    return [row for row, owner in zip(rows, owners, strict=True) if owner == given.rank]


def train_row(number: int, tokens: int, vocabulary: int) -> TrainRow:
    """Return a row of random tokens; all but the first are trained on."""
    rng = np.random.default_rng(number)
    mask = np.ones(tokens, np.uint8)
    mask[0] = 0
    return TrainRow(
        trajectory_id=str(number),
        tokens=rng.integers(3, vocabulary, tokens).astype(np.int32),
        mask=mask,
        logprobs=np.full(tokens, -2.0, np.float32) * mask,
        versions=np.zeros(tokens, np.int32),
        advantages=np.full(tokens, float(rng.normal()), np.float32),
        weights=np.full(tokens, 1.0 / tokens, np.float32),
    )


def _steps(given: Measurement) -> tuple[Steps, int]:
    model = Path(given.model)
    vocabulary = msgspec.json.decode((model / "config.json").read_bytes())["vocab_size"]
    if given.kind != "asyncrl":
        return Bare(model, given.device, given.micro_batch_tokens, exact=given.kind == "masters"), vocabulary
    on_gpu = given.device.startswith("cuda")
    settings: dict[str, Any] = {
        "device": f"cuda:{given.rank}" if on_gpu else given.device,
        "dtype": "bfloat16" if on_gpu else "float32",
        "micro_batch_tokens": given.micro_batch_tokens,
        "compiled": on_gpu,
    }
    settings |= {name: msgspec.convert(value, _type(name), strict=False) for name, value in given.options.items()}
    return TorchTrainer(model, TorchSettings(**settings)), vocabulary


def _type(name: str) -> Any:
    return type(getattr(TorchSettings(), name))


def timed_rows(steps: Steps, rows: Sequence[TrainRow], given: Measurement) -> Rows:
    """Time steps on the same rows."""
    cuda = given.device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = [timed(lambda: steps.step(rows, _OBJECTIVE), cuda) for _ in range(_WARM + given.rounds)]
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return Rows([], times[0], statistics.median(times[_WARM:]), peak)


def timed(work: Callable[[], object], cuda: bool) -> float:
    """Return the seconds of a call."""
    began = time.monotonic()
    work()
    if cuda:
        torch.cuda.synchronize()
    return time.monotonic() - began


def matmul_flops(device: str) -> float:
    """Measure operations per second of a product of large matrices: the best of several trials."""
    cuda = device.startswith("cuda")
    size = _MATRIX["cuda" if cuda else "cpu"]
    one = torch.randn(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32)

    def spell() -> None:
        for _ in range(10):
            torch.mm(one, one)

    spell()
    return 10 * 2 * size**3 / min(timed(spell, cuda) for _ in range(5))


if __name__ == "__main__":
    measure(msgspec.json.decode(sys.argv[1], type=Measurement))
