"""One rank of a case of `asyncrl bench megatron`: `python -m benchmarks.megatron_process CASE`, which is JSON.

The process prints its figures as a line of JSON after each kind of rows, and after the export of weights.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch.utils.checkpoint import checkpoint

from asyncrl.algorithms.balance import balanced
from asyncrl.algorithms.packing import first_fit
from asyncrl.algorithms.rows import TrainRow
from asyncrl.engine.embedded.config import ModelConfig
from asyncrl.imports import absent
from asyncrl.training.packing import packed, trained_places
from asyncrl.training.ranks import join_ranks, work_of
from benchmarks.learner_process import (
    LOGITS_AT_ONCE,
    Measured,
    Measurement,
    Steps,
    matmul_flops,
    timed,
    timed_rows,
    train_row,
)
from topics.batches import Objective

with absent("transformer_engine"):  # runs also load the library in this way, see `asyncrl.training.megatron.kind`
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.optimizer import get_megatron_optimizer

    from asyncrl.training.megatron.experts import Experts
    from asyncrl.training.megatron.families import read_family
    from asyncrl.training.megatron.mcore_patches import REPLICAS, around, join, optimizer_config, prepare
    from asyncrl.training.megatron.parallel_config import Layout
    from asyncrl.training.megatron.policy import Loading, MegatronPolicy
    from asyncrl.training.megatron.settings import MegatronSettings
    from asyncrl.training.megatron.trainer import MegatronTrainer


class Case(Measurement):
    """The settings of a case; `kind` is "megatron", "looped", "replayed" or "bare"."""

    layout: Layout = Layout()


class Bare:
    """A hand-written loop around the library and the trainer's modules, on one GPU."""

    def __init__(self, model: Path, given: Case) -> None:
        self._device = torch.device(given.device, 0) if given.device == "cuda" else torch.device(given.device)
        torch.set_num_threads(MegatronSettings().threads)
        prepare(self._device)
        self._budget, cuda = given.micro_batch_tokens, self._device.type == "cuda"
        dtype = torch.bfloat16 if cuda else torch.float32
        with around(self._device):
            join(Layout())
            how = Loading(Layout(), self._device, dtype, compiled=cuda)
            self._policy = MegatronPolicy(model, how)
            [chunk] = self._policy.chunks
            self._model = DistributedDataParallel(chunk.config, REPLICAS, chunk)
            config = optimizer_config(eps=1e-8, dtype=dtype)
            self._optimizer = get_megatron_optimizer(config, [self._model], use_gloo_process_groups=False)
        for group in self._optimizer.param_groups:
            group["lr"], group["fused"] = 1e-6, True

    def step(self, rows: Sequence[TrainRow], _: Objective) -> dict[str, float]:
        """See `Steps`."""
        with around(self._device):
            self._model.zero_grad_buffer()
            self._optimizer.zero_grad()
            for batch in first_fit([len(row.tokens) for row in rows], self._budget):
                self._backward([rows[index] for index in batch])
            finalize_model_grads([self._model], None)
            self._optimizer.step()
        return {}

    def _backward(self, rows: list[TrainRow]) -> None:
        share = self._policy.share(packed(rows, self._device))
        values = np.concatenate([row.weights * row.advantages for row in rows])[trained_places(rows)]
        weights = torch.from_numpy(values).to(self._device)
        hidden = self._policy.hidden(self._model, share).squeeze(1)[share.positions]
        pieces = zip(*(torch.split(one, LOGITS_AT_ONCE) for one in (hidden, share.targets)), strict=True)
        logprobs = torch.cat([checkpoint(self._logprobs, *piece, use_reentrant=False) for piece in pieces])
        torch.autograd.backward(-(weights * logprobs).sum())

    def _logprobs(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        last = self._policy.chunks[-1]
        logits = F.linear(hidden, last.shared_embedding_or_output_weight())
        return -F.cross_entropy(logits.float(), targets, reduction="none")


def measure(given: Case) -> None:
    """Measure and print."""
    if given.ranks > 1:
        join_ranks(Path(given.rendezvous), given.rank, given.ranks, given.device)
    model, layout = Path(given.model), given.layout
    steps = _steps(model, given, layout)
    _, shape = read_family(model)
    found = Measured(matmul_flops(given.device))
    for name, lengths in given.lengths.items():
        rows = [train_row(number, one, shape.vocab_size) for number, one in enumerate(lengths * given.ranks)]
        if given.kind == "replayed":
            rows = [_routed(row, shape) for row in rows]
        owners = balanced([work_of(model).of(len(row.tokens)) for row in rows], given.ranks // layout.model)
        replica = layout.replica(given.rank, given.ranks)
        own = [row for row, owner in zip(rows, owners, strict=True) if owner == replica]
        found.rows[name] = timed_rows(steps, own, given)
        found.rows[name].lengths = [len(row.tokens) for row in rows]
        print(msgspec.json.encode(found).decode(), flush=True)
    if isinstance(steps, MegatronTrainer):
        _export(steps, found, given)
        print(msgspec.json.encode(found).decode(), flush=True)


def _export(trainer: MegatronTrainer, found: Measured, given: Case) -> None:
    """Time copies of all weights to host memory, under their names on disk; a first copy allocates the memory."""
    trainer.copy_weights().files()
    spells = [timed(lambda: trainer.copy_weights().files(), given.device == "cuda") for _ in range(given.rounds)]
    found.export_s = min(spells)
    files = trainer.copy_weights().files()
    held = sum(tensor.content.nbytes for tensors in files.values() for tensor in tensors)
    size = torch.tensor(held, device=trainer.device)
    if given.ranks > 1:
        dist.all_reduce(size)
    found.export_bytes = int(size)


def _routed(row: TrainRow, shape: ModelConfig) -> TrainRow:
    """Return a row with randomly drawn experts for each token, different in every layer."""
    assert shape.experts is not None
    count, chosen = shape.experts.count, shape.experts.chosen
    drawn = np.random.default_rng(len(row.tokens)).random((len(row.tokens), shape.layers, count), np.float32)
    routing = np.argpartition(drawn, chosen, -1)[..., :chosen].astype(np.uint8)
    known = np.ones(len(row.tokens), np.bool_)
    return dataclasses.replace(row, routing=routing.reshape(len(row.tokens), -1), routed=known)


def _steps(model: Path, given: Case, layout: Layout) -> Steps:
    if given.kind == "bare":
        return Bare(model, given)
    if given.kind == "looped":
        Experts._products = _looped  # type: ignore[assignment, method-assign]
    on_gpu = given.device == "cuda"
    settings = MegatronSettings(
        layout=layout,
        device=given.device,
        dtype="bfloat16" if on_gpu else "float32",
        micro_batch_tokens=given.micro_batch_tokens,
        compiled=on_gpu,
        replays=given.kind == "replayed",
    )
    types = {name: type(getattr(settings, name)) for name in given.options}
    chosen = {name: msgspec.convert(value, types[name], strict=False) for name, value in given.options.items()}
    return MegatronTrainer(model, dataclasses.replace(settings, **chosen))


def _looped(_: Experts, hidden: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Compute the products of the experts one after another: see `Experts._products`."""
    parts = torch.tensor_split(hidden, ends[:-1].tolist())
    return torch.cat([F.linear(part, one) for part, one in zip(parts, weight, strict=True)])


if __name__ == "__main__":
    measure(msgspec.json.decode(sys.argv[1], type=Case))
