"""Messages about weights and checkpoints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from topics.ids import weights_name
from topics.topic import ENGINES, TRAINING, VITALS, WEIGHTS, Topic
from topics.wire import Count, Id, Message, Seconds, Sequence, Step, Version


class OfVersion(Message):
    """Base of messages about one version of the weights."""

    lineage: Count
    version: Version
    digest: str  # xxh3_128 of its manifest, hex: name, dtype, shape and digest of every tensor

    @property
    def key(self) -> str:
        """Return the name of this version on engines: `lineage:version:digest`."""
        return weights_name(self.lineage, self.version, self.digest)


class WeightsPublished(OfVersion):
    """A version is in the weight store, complete. Its identity is (run, lineage, version, digest)."""

    store: str  # a name in asyncrl.config.weights_settings.STORES
    location: str  # directory with its files, or its name among `weights.stored`
    base: str = ""  # key of the version that its files are a difference to; "": they are a Hugging Face model
    full: Count = 0  # sequence of the full version that its chain of differences begins with; 0 for a full one
    bytes: Count = 0  # of its tensors, or of their difference
    encode_s: Seconds = 0.0  # to compute the difference, even if it was not used
    write_s: Seconds = 0.0  # to write it, and to keep it in memory where the next one may be a difference to it
    choice: str = ""  # why it is a difference, or why not; "" where differences are not asked for
    answers: Count = 0  # sequence of the weights.published that an engine refused; its version is there once more
    adapts: str = ""  # digest of the model that its tensors are an adapter of; "": they are the weights themselves

    @property
    def is_unchanged(self) -> bool:
        """Return whether it has the tensors of its base: nothing is stored for it, and its location is the base's."""
        return self.base.rpartition(":")[2] == self.digest


UNTRAINED = WeightsPublished(0, 0, "model", "files", "")  # the original model; it is never published


class WeightsStored(Message):
    """One chunk of a version in the store `stream`; the bytes are the body, this is its description.

    The last one of a version is its index: MessagePack with the size of each file and the number of chunks.
    """

    version_name: Id  # "lineage0-v000012-" and 16 hexadecimal digits
    file: str  # a header
    offset: Count  # a header: where its bytes begin in the file


class WeightsRefused(Message):
    """An engine could not take the bytes of a version; it continues with its current version."""

    engine_id: Id
    lineage: Count
    version: Version
    sequence: Sequence  # of the weights.published that it followed
    reason: str


class WeightsRejected(Message):
    """A version that the learner did not publish: its weights are no numbers. It stops with an error."""

    lineage: Count
    version: Version
    reason: str


class WeightsUnchanged(Message):
    """A step changed no bit of any tensor: the version announced after this message has only a new number."""

    lineage: Count
    version: Version
    base: str  # key of the version that has the same tensors


_Key = Annotated[str, Meta(max_length=256)]  # `lineage:version:digest`


class WeightsRequested(Message):
    """Request of an engine to read a version from the learner's memory, which keeps it until a deadline."""

    engine_id: Id
    key: _Key
    request: Id  # a name that the answer repeats


class WeightsOffered(Message):
    """Answer to such a request: a version in memory, for processes of the same host; or why there is none."""

    engine_id: Id
    key: _Key
    request: Id
    host: Id = "none"  # of the memory, and its boot
    # By rank of the learner, there by the call in which a server gets them: zstd of a pickled list of names and shared
    # tensors, as torch's processes exchange them.
    tensors: list[list[bytes]] = field(default_factory=list)
    reason: str = ""  # why there are none


class WeightsReturned(Message):
    """An engine reads a version in the learner's memory no more."""

    engine_id: Id
    key: _Key
    reason: str = ""  # why it did not take the version from there; "": it did


class CheckpointSaved(Message):
    """A checkpoint counts from now on: it has everything needed to continue after `step`."""

    lineage: Count
    step: Step
    digest: str
    path: str
    batch_sequence: Count  # of the last batch.packed it contains


class CheckpointRestored(Message):
    """An alert takes training back to a checkpoint: the batches after it are skipped, on a new lineage."""

    lineage: Count  # the new one
    step: Step  # of the checkpoint
    until: Step  # newest step that was trained before; the batches up to it are skipped
    alert: str


class CheckpointLost(Message):
    """A checkpoint could not be read: it no longer counts, and its steps may have to be trained again."""

    lineage: Count
    step: Step
    path: str
    reason: str


class TrainingFinished(Message):
    """The learner has completed its task."""

    step: Step
    reason: str  # "steps" or what stopped it
    exported: str = ""  # directory of the final Hugging Face model


WEIGHTS_PUBLISHED = Topic(WeightsPublished, TRAINING, ("learner",), ("engine", "recorder", "supervisor"), id=("key",))
WEIGHTS_STORED = Topic(WeightsStored, WEIGHTS, ("learner",), ("engine",), key="version_name")
WEIGHTS_REFUSED = Topic(
    WeightsRefused,
    ENGINES,
    ("engine",),
    ("rollout", "gateway", "judge", "reward", "groupreward", "learner", "recorder", "supervisor"),
    key="engine_id",
    repeats=True,
)
WEIGHTS_REQUESTED = Topic(WeightsRequested, VITALS, ("engine",), ("learner",), key="engine_id", repeats=True)
WEIGHTS_OFFERED = Topic(WeightsOffered, VITALS, ("learner",), ("engine",), key="engine_id", repeats=True)
WEIGHTS_RETURNED = Topic(WeightsReturned, VITALS, ("engine",), ("learner",), key="engine_id", repeats=True)
WEIGHTS_REJECTED = Topic(WeightsRejected, TRAINING, ("learner",), ("recorder", "supervisor"), id=("lineage", "version"))
WEIGHTS_UNCHANGED = Topic(WeightsUnchanged, TRAINING, ("learner",), ("supervisor",), id=("lineage", "version"))
CHECKPOINT_SAVED = Topic(
    CheckpointSaved, TRAINING, ("learner",), ("learner", "supervisor", "recorder"), id=("lineage", "step")
)
CHECKPOINT_RESTORED = Topic(
    CheckpointRestored, TRAINING, ("learner",), ("learner", "supervisor", "recorder"), id=("lineage", "step")
)
CHECKPOINT_LOST = Topic(
    CheckpointLost, TRAINING, ("learner",), ("learner", "supervisor", "recorder"), id=("lineage", "step")
)
TRAINING_FINISHED = Topic(TrainingFinished, TRAINING, ("learner",), ("prompter", "supervisor", "recorder"))
