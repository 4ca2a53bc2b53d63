"""The checkpoints of a run. Learner and trimmer fold them the same way: the trimmer keeps the records that the learner
may read again."""

from __future__ import annotations

import msgspec

from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from topics.streams import CheckpointRequested
from topics.weights import CheckpointLost, CheckpointRestored, CheckpointSaved


class CheckpointState(msgspec.Struct):
    """The part of the state that is about checkpoints."""

    asked_after: int  # a checkpoint is asked for of a later step than this
    checkpoints: list[CheckpointSaved] = []  # those that are kept, the newest last


class CheckpointFold(Fold):
    """Base of the folds that follow checkpoints."""

    state: CheckpointState

    def __init__(self, config: Config) -> None:
        self._origin = config.origin
        self._keep_checkpoints = config.learner.keep_checkpoints

    @property
    def kept_step(self) -> int:
        """Step of the oldest kept checkpoint, up to which nothing is needed again. One alone may prove unreadable."""
        kept = self.state.checkpoints
        return min(saved.step for saved in kept) if len(kept) > 1 else self._origin

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint, or where training began."""
        return self.state.checkpoints[-1].step if self.state.checkpoints else self._origin

    def _forget(self) -> None:
        """Forget the steps up to `kept_step`."""

    def _on_saved(self, saved: CheckpointSaved, _record: Record) -> None:
        self.state.checkpoints = [*self.state.checkpoints, saved][-self._keep_checkpoints :]
        self._forget()

    def _on_lost(self, lost: CheckpointLost, _record: Record) -> None:
        self.state.checkpoints = [saved for saved in self.state.checkpoints if saved.path != lost.path]

    def _on_restored(self, restored: CheckpointRestored, _record: Record) -> None:
        self.state.checkpoints = [saved for saved in self.state.checkpoints if saved.step <= restored.step]

    def _on_checkpoint_requested(self, request: CheckpointRequested, _record: Record) -> None:
        self.state.asked_after = max(self.state.asked_after, request.after)
