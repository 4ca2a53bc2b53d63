"""Standstill of the learner for a publication and for a checkpoint, and the time until they are complete.

No server takes part: the steps, copies and files are those of the learner's trainer.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.algorithms.rows import TrainRow
from asyncrl.training.checkpoint import Checkpoint
from asyncrl.training.publisher import Publisher
from asyncrl.training.torch_trainer import TorchSettings, TorchTrainer
from asyncrl.weights.files import FileStore
from asyncrl.weights.folders import DiskFolder
from asyncrl.weights.tensors import HostTensor, write_tensors
from topics.batches import Objective

_WARM = 1  # rounds that are not counted


class Shape(NamedTuple):
    """A Qwen3 model, and the rows of a step."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    head_dim: int = 128


SHAPES = {
    "tiny": Shape(64, 2, 2, 1, 192, 40, 32),
    "0.6b": Shape(1024, 28, 16, 8, 3072, 151_936),
    "4b": Shape(2560, 36, 32, 8, 9728, 151_936),
}


def bench_publication(
    *, shape: str, directory: str, device: str, rounds: int, size: tuple[int, int], checkpoints: int
) -> dict[str, float]:
    """Measure steps alone, steps with a publication each, and checkpoints with steps beside them.

    Args:
        shape: a name in `SHAPES`.
        directory: folder on the disk that is measured; "" for a temporary one.
        device: "cpu", "cuda" or "cuda:N".
        rounds: of each kind, after one that is not counted; figures are medians.
        size: rows of a step, and tokens of each.
        checkpoints: as `rounds`, for checkpoints; 0 for none.

    Returns:
        Seconds, the name of the shape in front.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", dir=directory or None) as scratch:
        bench = _Bench(Path(scratch), SHAPES[shape], device, size)
        figures = bench.publications(rounds)
        if checkpoints:
            figures |= bench.checkpoints(checkpoints, figures["step_s"])
        return {f"{shape.replace('.', '_')}_{name}": value for name, value in figures.items()}


class _Bench:
    """A trainer at work."""

    def __init__(self, root: Path, shape: Shape, device: str, size: tuple[int, int]) -> None:
        rows, tokens = size
        self._root = root
        write_random_model(root / "model", shape, context=tokens)
        settings = TorchSettings(device=device, dtype="bfloat16", micro_batch_tokens=tokens, recompute=False)
        self._trainer = TorchTrainer(root / "model", settings)
        for path in (root / "model").glob("*.safetensors*"):
            path.unlink()  # room for what follows
        self._publisher = Publisher(self._trainer, store=FileStore(root / "weights"), checkpoints=root / "checkpoints")
        self._rows = [_row(number, tokens, shape.vocabulary) for number in range(rows)]
        self._steps = 0
        self._pool = ThreadPoolExecutor(1)

    def publications(self, rounds: int) -> dict[str, float]:
        """Steps alone, then steps with a publication each."""
        self._step()
        self._publisher.copy_weights()  # makes its memory
        self._publisher.publish(lineage=0, version=0)
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
            # The first of them has no publication beside it.
            "publication_standstill_s": statistics.median(periods[_WARM + 1 :]) - step_s,
            "publication_announced_s": statistics.median(announced[_WARM:]),
            "weights_gb": _size(self._root / "weights") / 1e9,
        }

    def checkpoints(self, rounds: int, step_s: float) -> dict[str, float]:
        """Checkpoints, one after the other, with steps beside them."""
        shutil.rmtree(self._root / "weights")  # room for what follows
        copies, stood, saved = [], [], []
        for _ in range(rounds + _WARM):
            shutil.rmtree(self._root / "checkpoints", ignore_errors=True)
            self._step()
            ended = time.monotonic()
            self._publisher.copy_state()
            copies.append(time.monotonic() - ended)
            saving = self._pool.submit(self._save, self._steps, ended)
            self._step()
            stood.append(time.monotonic() - ended - step_s)
            while not saving.done():
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
        """Seconds from the end of a step to the moment at which its version may be announced."""
        made = self._publisher.publish(lineage=0, version=version)
        took = time.monotonic() - ended
        for old in (self._root / "weights").iterdir():
            if old != Path(made.location):
                shutil.rmtree(old)
        return took

    def _save(self, step: int, ended: float) -> float:
        self._publisher.save(Checkpoint(0, step, f"{step:032d}", step))
        return time.monotonic() - ended


def write_random_model(directory: Path, shape: Shape, *, context: int, dtype: str = "bfloat16") -> list[HostTensor]:
    """Write a model of that shape with random weights; returns them."""
    config: Any = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        dtype=dtype,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    directory.mkdir()
    config.save_pretrained(directory)
    with torch.device("meta"):
        named = dict(Qwen3ForCausalLM(config).named_parameters())
    kind = getattr(torch, dtype)
    noise = (torch.randn(1 << 24) * 0.02).to(kind)
    tensors = []
    for name, parameter in named.items():
        count = parameter.numel()
        values = torch.ones(count, dtype=kind) if "norm" in name else noise.repeat(-(-count // len(noise)))
        content = values[:count].view(torch.uint8).numpy()
        tensors.append(HostTensor(name, dtype, list(parameter.shape), content))
    write_tensors(DiskFolder(directory), {"model": tensors})
    return tensors


def _row(number: int, tokens: int, vocabulary: int) -> TrainRow:
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


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
