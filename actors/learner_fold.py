"""What the learner knows: a pure function of the batch log and of its own."""

from __future__ import annotations

from typing import Any

from asyncrl.bus.log import Record
from topics.batches import BATCH_PACKED, BATCH_TRAINED, BatchPacked
from topics.evals import EVAL_REQUESTED
from topics.streams import CHECKPOINT_REQUESTED
from topics.topic import Topic
from topics.weights import CHECKPOINT_SAVED, TRAINING_FINISHED, WEIGHTS_PUBLISHED, CheckpointSaved, WeightsPublished


class LearnerFold:
    """Batches to come, and how far training was said to be."""

    def __init__(self, first_step: int) -> None:
        self.trained = first_step - 1  # newest step said to be trained
        self.line = 0
        self.published: dict[int, WeightsPublished] = {}  # newest line's, by version
        self.checkpoints: list[CheckpointSaved] = []
        self.evals: set[str] = set()
        self.finished = False
        self._first = first_step
        self._asked_after = first_step - 2  # a checkpoint is asked for of a later step than this
        self._batches: dict[int, tuple[BatchPacked, int]] = {}

    def apply(self, topic: Topic[Any], message: Any, record: Record) -> None:
        """Fold one message in."""
        if topic is BATCH_PACKED:
            self._batches[message.step] = (message, record.sequence)
        elif topic is BATCH_TRAINED:
            self.trained = message.step
            self.line = message.line
        elif topic is WEIGHTS_PUBLISHED:
            self.line = message.line
            self.published[message.version] = message
        elif topic is CHECKPOINT_SAVED:
            self.checkpoints.append(message)
        elif topic is EVAL_REQUESTED:
            self.evals.add(message.eval_id)
        elif topic is TRAINING_FINISHED:
            self.finished = True
        elif topic is CHECKPOINT_REQUESTED:
            self._asked_after = max(self._asked_after, message.after)

    def batch(self, step: int) -> tuple[BatchPacked, int] | None:
        """A batch and its sequence in the batch log, once packed."""
        return self._batches.get(step)

    def wants_checkpoint(self, step: int, *, every: int = 0) -> bool:
        """Whether a checkpoint of this step is wanted.

        Args:
            every: it is when a multiple of this many steps was passed since the last one; 0 for requests alone: one
                stands until a later checkpoint is saved.
        """
        newest = self.checkpoints[-1].step if self.checkpoints else self._first - 1
        passed = every > 0 and step // every > newest // every
        return step > newest and (passed or self._asked_after >= newest)

    def forget(self, step: int) -> None:
        """Batches up to this step are in a checkpoint."""
        for old in [number for number in self._batches if number <= step]:
            del self._batches[old]
