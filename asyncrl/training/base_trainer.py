"""The course of one step for any model: columns, loss, anomalies, update, copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial, wraps
from operator import itemgetter
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.hindsight import hindsight_sums
from asyncrl.algorithms.losses import loss_of
from asyncrl.algorithms.observations import OBSERVED, with_observations
from asyncrl.algorithms.penalties import columns_of, live_kl_sums, penalized, penalty_sums
from asyncrl.algorithms.rows import TOP, TrainRow
from asyncrl.algorithms.sums import Sums, metrics
from asyncrl.algorithms.token_loss import Loss, Tokens
from asyncrl.algorithms.whitening import whitened
from asyncrl.data.quantisation import Quantisation
from asyncrl.training.anomalies import Usual, departure
from asyncrl.training.checkpoint import CheckpointError
from asyncrl.training.cpu_offload import Offloader
from asyncrl.training.critic import Critic, largest_return
from asyncrl.training.gradient_attribution import RowPasses, is_finite, largest_carriers
from asyncrl.training.hindsight import HintedRows
from asyncrl.training.host_copy import HostCopy, Source
from asyncrl.training.model_optimizer import Update
from asyncrl.training.passes import Passes, Scorer
from asyncrl.training.passthrough_weights import PassthroughWeights
from asyncrl.training.protocol import NonFiniteLoss, Offloaded, RowError
from asyncrl.training.reference import Reference
from asyncrl.training.routing import Mixture, Recorded, check_routing
from asyncrl.training.settings import TrainerSettings
from asyncrl.training.tensor_files import TensorFiles
from asyncrl.training.vocabulary import Top
from asyncrl.weights.adapters import ADAPTER_CONFIG, PublishedAdapter, check_shape
from topics.batches import Anomaly, CriticStep, Objective
from topics.ids import LIVE, letter_of

P = ParamSpec("P")
R = TypeVar("R")

WEIGHTS, STATE = "model", "optimizer"
"""Stems of the files of a checkpoint."""

_NAMED_OFFENDERS = 8


class OptimizerState(Protocol):
    """The trained parameters with their optimiser: `asyncrl.training.model_optimizer.ModelOptimizer`."""

    def norm(self) -> float:
        """Norm of the gradient over all ranks."""

    def update(self, update: Update, norm: float) -> None:
        """Move the weights by the gradient, whose norm this is, and forget it."""

    def forget(self) -> None:
        """Forget the gradient."""

    def sources(self) -> list[Source]:
        """Tensors for a checkpoint."""

    def tensors(self) -> list[torch.Tensor]:
        """Weights, and the moments of the optimiser."""

    def gradients(self) -> list[torch.Tensor]:
        """Memory of gradients that is kept between the updates, and holds zeros then."""

    def load(self, directory: Path) -> None:
        """Continue from the files of a checkpoint."""


def on_device(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Let a method run as `BaseTrainer.placed` says: each call may come from another thread."""

    @wraps(method)
    def call(steps: Any, /, *arguments: P.args, **options: P.kwargs) -> R:
        with steps.placed():
            return method(steps, *arguments, **options)

    return call


class BaseTrainer:
    """Every part of `Trainer` that is the same for all models. A trainer gives it the parts declared here."""

    settings: TrainerSettings
    source: Path | None
    config: bytes | None = None
    form: Quantisation | None = None  # format of the published weights; None for the trained format
    replays = False  # tokens use the experts of the sampler
    records = False  # or to those of the pass that fills `proximal`
    anomaly: Anomaly | None = None
    beside_state: Mapping[str, bytes]
    adapter: PublishedAdapter | None = None
    device: torch.device
    scorers: dict[str, Scorer]
    """Return the model that fills each column which an objective may need, in a pass before the update."""

    _policy: Any  # a `Scorer` with `vocab_size` and `context`
    _passes: Passes
    _own: OptimizerState
    _alone: RowPasses
    _reference: Reference
    _critic: Critic | None = None
    _contexts: dict[str, int]  # by whose
    _mixture: Mixture | None = None  # where the model has experts
    _copies: tuple[HostCopy, HostCopy]
    _further: PassthroughWeights
    _dtype: torch.dtype  # of the published weights
    _offloader: Offloader  # all, while nothing is to be done
    _idle: Offloader  # policy or critic, while the other one learns
    _frozen: list[torch.Tensor]  # weights of a teacher
    _published: Mapping[int, torch.Tensor] = {}  # see `HostCopy.unchanged`; empty once a step may have moved weights

    def _on_device(self) -> AbstractContextManager[object]:
        """Let the trainer's device be the current one of the thread that calls."""
        raise NotImplementedError

    def placed(self) -> AbstractContextManager[object]:
        """Return what each call runs within: on the device, with all that `rest` moved away."""
        with self._on_device():
            self._offloader.reserve()
            self._offloader.come_back()
        return self._on_device()

    def _gradient(self, batches: list[list[TrainRow]], loss: Loss) -> tuple[Sums, float]:
        """Leave the gradient of the whole batch in the parameters; returns the batch's sums and its norm."""
        raise NotImplementedError

    def _weights(self) -> list[Source]:
        """Tensors of the whole model in published form."""
        raise NotImplementedError

    def _sources(self, *, whole: bool) -> list[Source]:
        """Tensors of versions, or of whole models."""
        form, sources = self.form, self._weights()
        sources += self._further.published(sources, self._dtype)
        return [one._replace(form=form.form) if form and one.name in form.names else one for one in sources]

    @on_device
    def step(self, rows: Sequence[TrainRow], objective: Objective, usual: Usual | None = None) -> dict[str, float]:
        self.anomaly, self._published = None, {}
        restored_s = self._offloader.onload_s
        self._check(rows)
        loss = loss_of(objective)
        if self._reference.is_due(objective.reference):
            self._order_copies()
        self._reference.follow(objective.reference)
        valued = self.with_advantages(rows, objective)
        with self._away(self._own if self._critic is not None else None):
            figures, critic_norm = self._criticised(valued, objective.critic)
        figures |= self._live_kl(valued) if objective.live_kl else {}
        if objective.moves_policy:
            # The critic learns from returns on the scale of the rewards.
            scaled = whitened(valued, self._passes.gathered) if objective.whiten else valued
            used = self.with_gradient(with_observations(scaled) if OBSERVED in loss.needs else scaled, loss)
            try:
                with self._away(self._critic):
                    figures |= self._policy_step(used, objective, usual)
            except NonFiniteLoss:
                if self._critic is not None:
                    self._critic.forget()
                raise
            figures["rows_skipped"] = float(len(rows) - len(used))
        if self._critic is not None and objective.critic is not None:
            self._order_copies()
            self._critic.update(objective.critic, critic_norm)
        figures |= {"restore_s": round(restored_s, 6)} if restored_s else {}
        return {"loss": 0.0, "rows": float(len(rows)), **figures}

    @contextmanager
    def _away(self, idle: OptimizerState | Critic | None) -> Iterator[None]:
        """Let a model leave the device while the other one learns, where the settings say so; with its gradient."""
        if idle is None or not self.settings.offloads:
            yield
            return
        self._order_copies()  # which may still read it
        held = idle.tensors()
        self._idle.leave([*held, *idle.gradients(), *(one.grad for one in held if one.grad is not None)])
        try:
            yield
        finally:
            self._idle.come_back()

    def _policy_step(self, used: list[TrainRow], objective: Objective, usual: Usual | None) -> dict[str, float]:
        loss = loss_of(objective)
        batches = self._passes.cut(used)
        sums, norm = self._gradient(batches, loss)
        total = float(sums.pop("loss", 0.0))
        if not np.isfinite([total, norm]).all():
            self._refuse(used, loss, f"loss {total}, gradient norm {norm}")
        if usual is not None and (found := departure(usual, total, norm)):
            carriers = self._alone.carriers(used, loss, finite=True)
            self.anomaly = Anomaly(found, largest_carriers(carriers))
            self._anew(batches, loss)  # the passes of single rows left another
        self._order_copies()
        self._own.update(
            Update(objective.learning_rate, objective.betas, objective.weight_decay, objective.max_grad_norm), norm
        )
        return {
            "loss": total,
            "grad_norm": norm,
            "learning_rate": objective.learning_rate,
            **self._passes.work(batches),
            **metrics(sums | self._passes.sums([self._row_sums(used, objective)])),
        }

    def _criticised(self, rows: Sequence[TrainRow], step: CriticStep | None) -> tuple[dict[str, float], float]:
        """Leave the gradient of the critic in its parameters; returns figures, and its norm."""
        if self._critic is None or step is None:
            return {}, 0.0
        valued = [row for row in rows if "values" in row.columns]
        norm, figures = self._critic.gradient(valued, step)
        if not np.isfinite([norm, *figures.values()]).all():
            self._critic.forget()
            largest = max(valued, key=largest_return, default=None)
            blame = f"; the largest return is of trajectory {largest.trajectory_id}" if largest else ""
            raise NonFiniteLoss(f"critic: gradient norm {norm}, {figures}{blame}; the weights were not touched")
        return figures, norm

    def _live_kl(self, rows: list[TrainRow]) -> dict[str, float]:
        """Measure how far live turns are from the reference, nats per token."""
        self._reference.begin()
        live = self._filled([row for row in rows if letter_of(row.trajectory_id) == LIVE], ("reference",))
        sums = {name: torch.tensor(value, device=self.device) for name, value in live_kl_sums(live).items()}
        nats, tokens = (float(value) for value in self._passes.sums([sums]).values())
        return {"live_reference_kl": nats / tokens} if tokens else {}

    def _order_copies(self) -> None:
        for copy in self._copies:
            copy.order()

    def with_advantages(self, rows: Sequence[TrainRow], objective: Objective) -> list[TrainRow]:
        """Rows that have trained tokens, with penalties and the advantages of single tokens.

        Raises:
            RowError: the rows lack a column, and nothing here fills it.
        """
        penalties = objective.penalties
        used = [row for row in rows if row.mask[1:].any()]
        used = [penalized(row, penalties) for row in self._filled(used, columns_of(penalties))]
        if objective.hindsight is not None:
            self._reference.begin()
            used = HintedRows(self._passes, self._policy, self._reference).look_back(used, objective.hindsight)
        for name, estimator in ADVANTAGES.items():
            if estimator.of_row is not None:
                own = self._filled([row for row in used if row.estimator == name], estimator.needs)
                made = iter([replace(row, advantages=estimator.of_row(row, objective)) for row in own])
                used = [next(made) if row.estimator == name else row for row in used]
        return used

    def with_gradient(self, rows: Sequence[TrainRow], loss: Loss) -> list[TrainRow]:
        """Those of the rows that have a gradient, with the columns that the loss needs, before the update.

        Raises:
            RowError: the rows lack a column, and nothing here fills it.
        """
        # A token without advantage has no gradient in a policy loss, so its row needs no forward pass. It
        # keeps its place in the denominators, which `build_rows` took over the whole batch.
        used = [row for row in rows if row.advantages.any() or not loss.uses_advantages]
        if loss.top_k and "teacher" in self.scorers:
            vocabulary = self._policy.vocab_size
            top = Top(min(loss.top_k, vocabulary), vocabulary)
            self.scorers[TOP] = partial(self.scorers["teacher"], wanted=top)
        used = self._filled(used, [name for name in loss.needs if name not in loss.of_batch])
        for name, of_batch in loss.of_batch.items():
            made = of_batch(used, self._passes.gathered)
            pairs = zip(used, made, strict=True)
            used = [replace(row, columns={**row.columns, name: column}) for row, column in pairs]
        return used

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
            recorded = Recorded(self._policy.taken)
            records = self.records and name == "proximal"
            found = self._passes.column(self.scorers[name], lacking, recorded.keep if records else None)
            rows = [
                replace(row, columns={**row.columns, name: found[id(row)]}, routing=recorded.of(row))
                if id(row) in found
                else row
                for row in rows
            ]
        return rows

    def _check(self, rows: Sequence[TrainRow]) -> None:
        vocabulary, (whose, context) = self._policy.vocab_size, min(self._contexts.items(), key=itemgetter(1))
        for row in rows:
            if self._mixture is not None:
                check_routing(row, self._mixture)
            if len(row.tokens) > context:
                raise RowError(
                    f"trajectory {row.trajectory_id}: {len(row.tokens)} tokens, the {whose}'s context is {context}; "
                    f"set engine.context = {context}, so that none becomes longer"
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

    def _anew(self, batches: list[list[TrainRow]], loss: Loss) -> tuple[Sums, float]:
        """Compute a gradient, without the one that is there."""
        self._own.forget()
        return self._gradient(batches, loss)

    def _inputs(self, rows: Sequence[TrainRow], loss: Loss) -> tuple[torch.Tensor, torch.Tensor, Tokens]:
        """Log-probs and entropies, [N] each, and what else the loss of a micro-batch reads."""
        batch = self._passes.lay(rows, loss.needs)
        columns = dict(batch.tokens.columns)
        wanted = {"wanted": columns[TOP][..., 0].long()} if loss.top_k else {}
        logprobs, entropy, *outcomes = self._policy(*batch.inputs, **wanted)
        columns |= {"entropy": entropy} if loss.uses_entropy else {}
        columns |= dict(zip(("outcomes",), outcomes, strict=False))
        return logprobs, entropy, batch.tokens._replace(columns=columns)

    def _row_sums(self, rows: Sequence[TrainRow], objective: Objective) -> Sums:
        found = penalty_sums(rows, objective.penalties) | hindsight_sums(rows, objective.hindsight)
        if self.replays:
            found["routed_anew"] = float(sum(row.unrouted for row in rows))
        return {name: torch.tensor(value, device=self.device) for name, value in found.items()}

    @on_device
    def copy_weights(self, *, whole: bool = False) -> HostCopy:
        self._published = {}  # a copy that fails has written over some of it
        self._copies[0].begin(self._sources(whole=whole))
        self._published = self._copies[0].unchanged()
        return self._copies[0]

    @on_device
    def copy_state(self) -> HostCopy:
        rng = torch.get_rng_state()
        sources = [*self._own.sources(), Source(STATE, "rng", rng, rng.dtype)]
        sources += self._further.kept(sources)
        sources += self._reference.sources() + (self._critic.sources() if self._critic else [])
        self._copies[1].begin(sources)
        return self._copies[1]

    def rest(self) -> Offloaded:
        with self._on_device():
            critic = self._critic
            models = [self._own.tensors(), self._reference.tensors(), critic.tensors() if critic else [], self._frozen]
            zeros = self._own.gradients() + (critic.gradients() if critic else [])
            tensors = [tensor for model in models for tensor in model]
            return self._offloader.vacate(tensors, zeros, self._published, self._order_copies)

    @on_device
    def load(self, directory: Path) -> None:
        self._published = {}
        check_shape(directory, self.beside_state.get(ADAPTER_CONFIG))
        try:
            self._own.load(directory)
            self._reference.load(directory)
            self._further.load(directory)
            if self._critic is not None:
                self._critic.load(directory)
            with TensorFiles(directory, STATE) as state:
                torch.set_rng_state(state["rng"])
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{directory} cannot be read ({error}); this checkpoint is torn, use another"
            ) from error

    def _refuse(self, rows: Sequence[TrainRow], loss: Loss, found: str) -> None:
        tried = self._alone.carriers(rows, loss, finite=False)
        self._own.forget()
        offenders = [carrier for carrier in tried if not is_finite(carrier)]
        names = list(dict.fromkeys(carrier.trajectory_id for carrier in offenders))
        shown = ", ".join(names[:_NAMED_OFFENDERS]) + (", ..." if len(names) > _NAMED_OFFENDERS else "")
        blame = (
            f"{len(offenders)} of {len(tried)} rows tried alone, of trajectories {shown}"
            if offenders
            else "no row alone"
        )
        raise NonFiniteLoss(f"{found}, caused by {blame}; the weights were not touched")
