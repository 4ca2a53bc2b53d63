"""The trainer on transformers models: AdamW, FSDP2 on GPUs, plain torch on one CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.losses import loss_of
from asyncrl.algorithms.packing import micro_batches, padding_share
from asyncrl.algorithms.rows import TrainRow, weightless
from asyncrl.algorithms.sums import Sums, merge_sums, metrics
from asyncrl.algorithms.token_loss import Loss
from asyncrl.training.checkpoint import CheckpointError
from asyncrl.training.host_copy import HostCopy, Source
from asyncrl.training.padding import PaddedRows, pad_rows, unpadded
from asyncrl.training.policy import load_policy
from asyncrl.training.protocol import NonFiniteLoss, RowError
from topics.batches import Objective

_WEIGHTS, _STATE = "model", "optimizer"  # stems of files
_MOMENTS = ("exp_avg", "exp_avg_sq")
_NAMED_OFFENDERS = 8


Scorer: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
"""A value of each of N tokens from the arguments of `Policy.forward`, and what is not used here."""


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """The settings of a `TorchTrainer`."""

    device: str = "cpu"  # "cpu", "cuda" or "cuda:N"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the matrix products and the published weights; master weights and moments are float32."""
    micro_batch_tokens: int = 4096
    recompute: bool = False
    threads: int = 1
    eps: float = 1e-8


class TorchTrainer:
    """See `Trainer`."""

    def __init__(self, directory: Path, settings: TorchSettings | None = None) -> None:
        """Load the model of a Hugging Face directory, which must stay there: versions need its tokenizer."""
        self.settings = settings or TorchSettings()
        torch.set_num_threads(self.settings.threads)
        self.source: Path | None = directory
        self._device = torch.device(self.settings.device)
        self._dtype = torch.float32 if self.settings.dtype == "float32" else torch.bfloat16
        self._policy = load_policy(directory, device=self._device, dtype=self._dtype, recompute=self.settings.recompute)
        self._parameters: dict[str, torch.nn.Parameter] = dict(self._policy.model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=0.0,
            eps=self.settings.eps,
            fused=True,
        )
        self.scorers: dict[str, Scorer] = {"proximal": self._policy}
        """Return the model that fills each column which an objective may need, in a pass before the update."""
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        first = self._ranks == 1 or dist.get_rank() == 0
        self._copies = HostCopy(self._device, keeps=first), HostCopy(self._device, keeps=first)

    def step(self, rows: Sequence[TrainRow], objective: Objective) -> dict[str, float]:
        """See `Trainer.step`."""
        self._check(rows)
        loss = loss_of(objective)
        used = self.prepare(rows, loss)
        batches = self._cut(used)
        sums, norm = self._gradient(batches, loss)
        total = float(sums.pop("loss", 0.0))
        if not np.isfinite([total, norm]).all():
            self._refuse(used, loss, f"loss {total}, gradient norm {norm}")
        most = objective.max_grad_norm
        clip_grads_with_norm_(self._parameters.values(), most, torch.tensor(norm, device=self._device))
        for group in self._optimizer.param_groups:
            group["lr"], group["betas"] = objective.learning_rate, objective.betas
            group["weight_decay"] = objective.weight_decay
        for copy in self._copies:
            copy.order()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {
            "loss": total,
            "grad_norm": norm,
            "learning_rate": objective.learning_rate,
            "rows": float(len(rows)),
            "rows_skipped": float(len(rows) - len(used)),
            "padding_share": padding_share([[len(row.tokens) for row in batch] for batch in batches]),
            **metrics(sums),
        }

    def prepare(self, rows: Sequence[TrainRow], loss: Loss) -> list[TrainRow]:
        """Rows that have a gradient, with the columns that the objective needs, of the weights before the update.

        Raises:
            RowError: the rows lack a column, and nothing here fills it.
        """
        used = [row for row in rows if row.mask[1:].any()]
        for name, estimator in ADVANTAGES.items():
            if estimator.of_row is not None:
                own = self._filled([row for row in used if row.estimator == name], estimator.needs)
                made = iter([replace(row, advantages=estimator.of_row(row)) for row in own])
                used = [next(made) if row.estimator == name else row for row in used]
        # A token without advantage has no gradient in a policy loss, so its row needs no forward pass. It
        # keeps its place in the denominators, which `build_rows` took over the whole batch.
        used = [row for row in used if row.advantages.any() or not loss.uses_advantages]
        return self._filled(used, loss.needs)

    def _filled(self, rows: list[TrainRow], columns: Sequence[str]) -> list[TrainRow]:
        """The rows with these columns; those that they lack take a pass each, on every rank."""
        for name in columns:
            lacking = [row for row in rows if name not in row.columns]
            if name not in self.scorers:
                if lacking:
                    raise RowError(
                        f'trajectory {lacking[0].trajectory_id}: the objective needs the column "{name}", which is not '
                        f"there, and this trainer fills only {', '.join(self.scorers)}"
                    )
                continue
            filled: dict[int, TrainRow] = {}
            for batch in self._even(self._cut(lacking)):
                with torch.no_grad():
                    values, _ = self._scored(self.scorers[name], pad_rows(batch, self._device))
                for row, column in zip(batch, unpadded(values, batch), strict=True):
                    filled[id(row)] = replace(row, columns={**row.columns, name: column})
            rows = [filled.get(id(row), row) for row in rows]
        return rows

    def _cut(self, rows: Sequence[TrainRow]) -> list[list[TrainRow]]:
        lengths = [len(row.tokens) for row in rows]
        cut = micro_batches(lengths, micro_batch_tokens=self.settings.micro_batch_tokens)
        return [[rows[index] for index in batch] for batch in cut]

    def _even(self, batches: list[list[TrainRow]], columns: Sequence[str] = ()) -> list[list[TrainRow]]:
        """As many on every rank, for FSDP2 gathers parameters in step; the surplus ones weigh nothing."""
        if self._ranks == 1:
            return batches  # and no value is read from the device: a copy of the weights may be under way from there
        count = self._reduced(torch.tensor([len(batches)], device=self._device), dist.ReduceOp.MAX).item()
        return batches + [[weightless(columns)]] * (int(count) - len(batches))

    def _check(self, rows: Sequence[TrainRow]) -> None:
        vocabulary, context = self._policy.vocab_size, self._policy.context
        for row in rows:
            if len(row.tokens) > context:
                raise RowError(
                    f"trajectory {row.trajectory_id}: {len(row.tokens)} tokens, the model's context is {context}"
                )
            if row.temperature <= 0.0:
                raise RowError(f"trajectory {row.trajectory_id}: sampled at temperature 0, which defines no log-prob")
        flat = np.concatenate([row.tokens for row in rows]) if rows else np.zeros(0, np.int32)
        if flat.size and not 0 <= flat.min() <= flat.max() < vocabulary:
            row = next(
                row for row in rows if row.tokens.size and not 0 <= row.tokens.min() <= row.tokens.max() < vocabulary
            )
            raise RowError(
                f"trajectory {row.trajectory_id}: tokens {row.tokens.min()} to {row.tokens.max()}, the model has "
                f"{vocabulary}; the rollout's tokenizer belongs to another model"
            )

    def _gradient(self, batches: list[list[TrainRow]], loss: Loss) -> tuple[Sums, float]:
        """Leave the gradient of the whole batch in the parameters; returns the batch's sums and its norm."""
        parts = [self._backward(rows, loss) for rows in self._even(batches, loss.needs)]
        for parameter in self._parameters.values():
            if parameter.grad is None:
                # Momentum moves on even where a batch has no gradient.
                parameter.grad = torch.zeros_like(parameter)
        norm = get_total_norm([parameter.grad for parameter in self._parameters.values() if parameter.grad is not None])
        return self._reduced_sums(merge_sums(parts)), float(_full(norm))

    def _backward(self, rows: Sequence[TrainRow], loss: Loss) -> Sums:
        batch = pad_rows(rows, self._device, loss.needs)
        logprobs, entropy = self._scored(self._policy, batch)
        total, sums = loss(logprobs, batch.tokens)
        # FSDP2 averages gradients over ranks; the weights are shares of the whole batch, so they add up.
        torch.autograd.backward(total * self._ranks)
        return {**sums, "loss": total.detach(), "entropy": (entropy * (batch.tokens.weights > 0)).sum()}

    def _scored(self, scorer: Scorer, batch: PaddedRows) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = self._dtype != torch.float32 and self._ranks == 1 and self._device.type == "cpu"
        with torch.autocast("cpu", self._dtype) if mixed else nullcontext():
            return scorer(*batch.inputs)

    def _reduced(self, values: torch.Tensor, how: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self._ranks > 1:
            dist.all_reduce(values, op=how)
        return values

    def _reduced_sums(self, sums: Sums) -> Sums:
        if self._ranks == 1 or not sums:
            return sums
        gathered = [torch.zeros(len(sums), device=self._device) for _ in range(self._ranks)]
        dist.all_gather(gathered, torch.stack(list(sums.values())))
        return merge_sums([dict(zip(sums, values, strict=True)) for values in gathered])

    def copy_weights(self) -> HostCopy:
        """See `Trainer.copy_weights`; in `TorchSettings.dtype`."""
        sources = [Source(_WEIGHTS, name, parameter, self._dtype) for name, parameter in self._parameters.items()]
        self._copies[0].begin(sources)
        return self._copies[0]

    def copy_state(self) -> HostCopy:
        """See `Trainer.copy_state`."""
        sources = [Source(_WEIGHTS, name, parameter, parameter.dtype) for name, parameter in self._parameters.items()]
        state = {"rng": torch.get_rng_state()}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state[parameter].items():
                state[f"{key}.{name}"] = value
        sources += [Source(_STATE, name, value, value.dtype) for name, value in state.items()]
        self._copies[1].begin(sources)
        return self._copies[1]

    def load(self, directory: Path) -> None:
        """See `Trainer.load`. Tensors are read one at a time."""
        try:
            with _Reader(directory, _WEIGHTS) as weights, _Reader(directory, _STATE) as state:
                self._check_shapes(weights)
                self._load(weights, state)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{directory} cannot be read ({error}); this checkpoint is torn, use another"
            ) from error

    def _check_shapes(self, weights: _Reader) -> None:
        found = {name: weights.shape(name) for name in weights.names}
        expected = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        if found != expected:
            name = min(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            raise CheckpointError(
                f"{weights.directory}: {name} has shape {found.get(name)}, the model in {self.source} "
                f"has {expected.get(name)}; a checkpoint continues only the model it was made from"
            )

    def _load(self, weights: _Reader, state: _Reader) -> None:
        events: dict[int, dict[str, torch.Tensor]] = {}
        for index, (name, parameter) in enumerate(self._parameters.items()):
            with torch.no_grad():
                parameter.copy_(_placed(weights[name], parameter))
            if f"step.{name}" in state.names:
                kept = {key: _placed(state[f"{key}.{name}"], parameter) for key in _MOMENTS}
                events[index] = {"step": state[f"step.{name}"], **kept}
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": events, "param_groups": groups})
        torch.set_rng_state(state["rng"])

    def _refuse(self, rows: Sequence[TrainRow], loss: Loss, found: str) -> None:
        offenders = []
        # Rows of other ranks cannot be distinguished here, and a pass of one rank alone would hang the others.
        for row in rows if self._ranks == 1 else ():
            self._optimizer.zero_grad()
            sums, norm = self._gradient([[row]], loss)
            if not np.isfinite([float(sums["loss"]), norm]).all():
                offenders.append(row.trajectory_id)
        self._optimizer.zero_grad()
        names = list(dict.fromkeys(offenders))
        shown = ", ".join(names[:_NAMED_OFFENDERS]) + (", ..." if len(names) > _NAMED_OFFENDERS else "")
        blame = f"{len(offenders)} of {len(rows)} rows, of trajectories {shown}" if offenders else "no row alone"
        raise NonFiniteLoss(f"{found}, caused by {blame}; the weights were not touched")


def _full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _placed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A full tensor, on the devices where `like` lies."""
    value = value.to(like.device)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


class _Reader:
    """Tensors in the files of a stem, read as they are asked for."""

    def __init__(self, directory: Path, stem: str) -> None:
        self.directory = directory
        self.names: dict[str, Any] = {}  # the open file that holds a tensor
        self._stack = ExitStack()
        self._paths = sorted(directory.glob(f"{stem}*.safetensors"))
        if not self._paths:
            raise FileNotFoundError(f"no {stem}.safetensors in {directory}")

    def __enter__(self) -> _Reader:
        for path in self._paths:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self.names |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self.names[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, which is not read for it."""
        return tuple(self.names[name].get_slice(name).get_shape())
