"""The fold of the learner: a pure function of the batch log and its own log, small however long a run is."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from actors.runtime.checkpoints import CheckpointFold, CheckpointState
from asyncrl.bus.log import Record
from asyncrl.config.held_out import HeldOut, evaluated_sets, held_out_sets
from asyncrl.config.settings import Config
from asyncrl.config.weights_settings import WeightsSettings
from asyncrl.errors import AsyncRLError
from asyncrl.training.anomalies import Figures, with_figures
from asyncrl.weights.delta_policy import Costs
from topics.actors import SkipRequested
from topics.alerts import AlertRaised, UnpauseRequested
from topics.batches import BatchPacked, BatchTrained
from topics.engines import EngineReady
from topics.evals import EvalRequested
from topics.gpu_handoff import CardLeft, CardRequested, CardTaken
from topics.ids import EVALUATION, prompt_name
from topics.profiles import ProfileRequested, ProfileStored
from topics.topic import Topic
from topics.weights import (
    CheckpointRestored,
    TrainingFinished,
    WeightsPublished,
    WeightsRefused,
)

_AT_HAND = 2  # batches kept as they were read: the buffer packs one ahead at most


class TurnState(msgspec.Struct):
    """The holders of a GPU that learner and engines time-share."""

    turn: int = 0  # newest one that a learner asked for
    holders: list[str] = []  # engines that took the GPU, and have not left it
    taken: int = 0  # sequence of the newest card.taken


class LearnerState(CheckpointState, msgspec.Struct, kw_only=True):
    """The whole state as plain data, which snapshots hold. A field whose meaning changes gets another name."""

    trained: int  # newest step reported trained
    lineage: int = 0
    published: dict[int, str] = {}  # newest lineage's digests, by version: of what may be trained again
    batches: dict[int, int] = {}  # sequences in the batch log, by step: of what may be trained again, or is to be
    asked_for: dict[str, int] = {}  # newest version an evaluation was asked for, by held-out set
    evaluations: int = 0  # that were asked for
    skip_requests: list[int] = []  # steps whose batches are to be skipped
    skipped: list[int] = []  # those that were; few, and for ever: checkpoints that contain them may prove unreadable
    finished: int | None = None  # step at which training was reported finished
    announced: int = 0  # sequence of the newest weights.published
    newest: str = ""  # key of that version
    full: int = 0  # sequence of the newest one with a full version
    chained: int = 0  # differences since that one
    costs: Costs = msgspec.field(default_factory=Costs)
    refused: int = 0  # of the newest one that an engine refused
    figures: dict[str, Figures] = {}  # of the newest steps, by stage
    turns: TurnState = msgspec.field(default_factory=TurnState)
    paused_at: int = 0  # sequence of the newest alert that pauses
    unpaused: int = 0  # sequence of the newest alert that an operator answered
    rollbacks: list[AlertRaised] = []  # alerts that ask for a rollback, and are not answered
    profiles_asked: int = 0  # traces of steps in all, once the open request is answered
    profiles_stored: int = 0
    restored: int | None = None  # newest step that a rollback skipped


class LearnerFold(CheckpointFold):
    """Batches to come, and how far training has been reported."""

    state: LearnerState

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._at_hand: dict[int, BatchPacked] = {}
        self.state = LearnerState(config.origin - 1, trained=config.origin)

    def advice(self, error: AsyncRLError, step: int, root: Path | None) -> str:
        """Return the reason why a step failed, and what to do.

        Args:
            root: of the run, where its batch may be skipped.
        """
        saved = self.state.checkpoints
        reason = str(error).removeprefix(f"batch {step}: ")
        words = f"batch {step}: {reason}; the last checkpoint is intact: {saved[-1].path if saved else 'none yet'}"
        if root is None or step <= self.state.trained:
            return words
        return f"{words}; to continue without this batch: asyncrl up --resume {root} --skip-batch {step}"

    def _on_trained(self, trained: BatchTrained, _record: Record) -> None:
        self.state.trained = trained.step
        self._enter(trained.lineage)
        self.state.figures = with_figures(self.state.figures, trained.stage, trained.metrics)
        if trained.skipped:
            self.state.skipped.append(trained.step)

    def _on_published(self, published: WeightsPublished, record: Record) -> None:
        self.state.announced = record.sequence
        self.state.newest = published.base if published.is_unchanged else published.key
        self.state.full = self.state.full if published.base else record.sequence
        self.state.chained = self.state.chained + (not published.is_unchanged) if published.base else 0
        if not published.is_unchanged:  # nothing was encoded, written or fetched
            self.state.costs.add_published(published)
        self._enter(published.lineage)
        self.state.published[published.version] = published.digest

    def _enter(self, lineage: int) -> None:
        """Forget the digests of an older lineage: a newer lineage has other weights at the same steps."""
        if lineage != self.state.lineage:
            self.state.lineage, self.state.published = lineage, {}

    def _on_ready(self, ready: EngineReady, _record: Record) -> None:
        if not ready.direct:
            self.state.costs.add_loaded(ready)

    def full_because(self, settings: WeightsSettings, lineage: int) -> str:
        """Return why the next version must be full; empty if it may be a difference to the newest."""
        state = self.state
        if settings.delta == "never":
            return "weights.delta is never"
        if lineage != state.lineage or not state.newest:
            return "the first of its lineage"
        if state.refused >= state.full:  # the newest full version, or one that builds on it
            return "an engine refused the one before"
        if state.chained + 1 >= settings.full_every:
            return f"{state.chained} differences came before it"
        return "" if settings.delta == "always" else state.costs.full_because()

    def _on_refused(self, refused: WeightsRefused, _record: Record) -> None:
        self.state.refused = max(self.state.refused, refused.sequence)

    @property
    def unanswered(self) -> int:
        """Sequence of the newest weights.published, where an engine refused that one; else 0."""
        return self.state.announced if self.state.announced == self.state.refused else 0

    def _on_asked(self, asked: CardRequested, _record: Record) -> None:
        turns = self.state.turns
        turns.turn = asked.turn
        turns.holders = [name for name in turns.holders if name not in asked.without]

    def _on_taken(self, taken: CardTaken, record: Record) -> None:
        turns = self.state.turns
        turns.taken = record.sequence
        turns.holders = sorted({*turns.holders, taken.engine_id})

    def _on_left(self, left: CardLeft, _record: Record) -> None:
        turns = self.state.turns
        turns.holders = [name for name in turns.holders if name != left.engine_id]

    def _on_skip(self, request: SkipRequested, _record: Record) -> None:
        self.state.skip_requests.append(request.step)

    def _on_alert(self, alert: AlertRaised, record: Record) -> None:
        if alert.do == "pause":
            self.state.paused_at = record.sequence
        if alert.do == "rollback":
            self.state.rollbacks.append(alert)
            self._drop_answered()

    def _on_unpause(self, request: UnpauseRequested, _record: Record) -> None:
        self.state.unpaused = max(self.state.unpaused, request.after)

    @property
    def paused(self) -> bool:
        """Return whether an alert paused training, and no operator has answered."""
        return self.state.paused_at > self.state.unpaused

    def _on_restored(self, restored: CheckpointRestored, record: Record) -> None:
        super()._on_restored(restored, record)
        self.state.trained, self.state.restored = restored.step, restored.until
        self.state.skip_requests += range(restored.step + 1, restored.until + 1)
        self._enter(restored.lineage)
        self._drop_answered()

    def _drop_answered(self) -> None:
        """Forget alerts about skipped steps: the two logs are read in any order."""
        restored = self.state.restored
        self.state.rollbacks = [one for one in self.state.rollbacks if restored is None or one.step > restored]

    @property
    def rollback(self) -> AlertRaised | None:
        """The open request that goes back furthest."""
        return min(self.state.rollbacks, key=lambda alert: alert.checkpoint or 0, default=None)

    def roll_back(self) -> CheckpointRestored:
        """Return what an open rollback records: a lineage that begins at the checkpoint, and skips the steps since.

        Raises:
            LookupError: no rollback is asked for.
        """
        if (alert := self.rollback) is None:
            raise LookupError("no alert asks for a rollback; expected one")
        state, step = self.state, self._origin if alert.checkpoint is None else alert.checkpoint
        return CheckpointRestored(state.lineage + 1, step, state.trained, alert.alert)

    def _on_profile_requested(self, request: ProfileRequested, _record: Record) -> None:
        self.state.profiles_asked = self.state.profiles_stored + request.steps

    def _on_profile_stored(self, stored: ProfileStored, _record: Record) -> None:
        self.state.profiles_stored += stored.kind == "steps"

    def _on_eval(self, request: EvalRequested, _record: Record) -> None:
        self.state.asked_for[request.dataset] = request.version
        self.state.evaluations += 1

    def _on_finished(self, finished: TrainingFinished, _record: Record) -> None:
        self.state.finished = finished.step

    def sequence(self, step: int) -> int | None:
        """Return the sequence of a batch on the batch log, once packed."""
        return self.state.batches.get(step)

    def at_hand(self, step: int) -> BatchPacked | None:
        """A batch as it was read, if it is one of the newest."""
        return self._at_hand.get(step)

    def skips(self, step: int) -> bool:
        """Return whether a batch is skipped; a batch that was trained before is skipped again only if it was skipped
        then."""
        return step in (self.state.skipped if step <= self.state.trained else self.state.skip_requests)

    def wants_checkpoint(self, step: int, begun: float = -math.inf, *, every: int = 0) -> bool:
        """Return whether a checkpoint of this step is wanted.

        Args:
            begun: step of the newest checkpoint that this process began.
            every: a checkpoint is wanted once training passed a multiple of this many steps since the last one; 0: only
                on request. A request holds until a later checkpoint is saved.
        """
        newest = max(self.saved_step, begun)
        passed = every > 0 and step // every > newest // every
        return step > newest and (passed or self.state.asked_after >= newest)

    def recall(self, _topic: Topic[BatchPacked], packed: BatchPacked, record: Record) -> None:
        """Fold a batch in again that was forgotten: no checkpoint contains it after all."""
        self.state.batches[packed.step] = record.sequence

    def _on_packed(self, packed: BatchPacked, record: Record) -> None:
        if packed.step <= self.kept_step:
            return
        self.state.batches[packed.step] = record.sequence
        self._at_hand[packed.step] = packed
        for step in sorted(self._at_hand)[:-_AT_HAND]:
            del self._at_hand[step]

    def _forget(self) -> None:
        contained, state = self.kept_step, self.state
        state.batches = {step: sequence for step, sequence in state.batches.items() if step > contained}
        state.published = {version: digest for version, digest in state.published.items() if version >= contained}


class Evaluations:
    """Names the evaluations of a version, each once."""

    def __init__(self, config: Config, fold: LearnerFold) -> None:
        self._config, self._sets = config, held_out_sets(config)
        self._fold = fold
        self._asked = 0  # as far as this process knows: a request may be read back after the next one is made

    def due(self, step: int) -> list[EvalRequested]:
        """The requests that are due at a step: of the first version, of the last, and at each set's interval."""
        asked = self._fold.state.asked_for
        names = evaluated_sets(self._config, step)
        return [self._request(self._sets[name], step) for name in names if asked.get(name, -1) < step]

    def _request(self, held_out: HeldOut, version: int) -> EvalRequested:
        number = max(self._asked, self._fold.state.evaluations)
        self._asked = number + 1
        return EvalRequested(
            prompt_name(EVALUATION, number),
            version,
            held_out.prompts,
            held_out.temperature,
            dataset=held_out.name,
            samples=held_out.samples,
        )
