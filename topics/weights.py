"""Messages about weights and checkpoints."""

from __future__ import annotations

from topics.topic import TRAINING, Topic
from topics.wire import Count, Message, Step, Version


class WeightsPublished(Message):
    """A version is in the weight store, complete. Its identity is (run, lineage, version, digest)."""

    lineage: Count
    version: Version
    digest: str  # xxh3_128 of its manifest, hex: name, dtype, shape and digest of every tensor
    store: str  # a name in asyncrl.weights.store.STORES
    location: str  # directory with a Hugging Face model and its manifest.jsonl

    @property
    def key(self) -> str:
        """Return the name of this version on engines: `lineage:version:digest`."""
        return f"{self.lineage}:{self.version}:{self.digest}"


class CheckpointSaved(Message):
    """A checkpoint counts from here on: everything needed to go on after `step`."""

    lineage: Count
    step: Step
    digest: str
    path: str
    batch_sequence: Count  # of the last batch.packed it contains


class CheckpointLost(Message):
    """A checkpoint could not be read: it counts no more, and what it contained may have to be trained again."""

    lineage: Count
    step: Step
    path: str
    reason: str


class TrainingFinished(Message):
    """The learner has done what it was asked for."""

    step: Step
    reason: str  # "steps" or what stopped it
    exported: str = ""  # directory of the final Hugging Face model


WEIGHTS_PUBLISHED = Topic(
    "weights.published",
    WeightsPublished,
    TRAINING,
    publishers=("learner",),
    subscribers=("engine", "recorder", "supervisor"),
    id=("key",),
)
CHECKPOINT_SAVED = Topic(
    "checkpoint.saved",
    CheckpointSaved,
    TRAINING,
    publishers=("learner",),
    subscribers=("learner", "supervisor", "recorder"),
    id=("lineage", "step"),
)
CHECKPOINT_LOST = Topic(
    "checkpoint.lost",
    CheckpointLost,
    TRAINING,
    publishers=("learner",),
    subscribers=("learner", "supervisor", "recorder"),
    id=("lineage", "step"),
)
TRAINING_FINISHED = Topic(
    "training.finished",
    TrainingFinished,
    TRAINING,
    publishers=("learner",),
    subscribers=("prompter", "supervisor", "recorder"),
)
