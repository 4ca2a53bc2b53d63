"""Messages about the room that is left in payload streams."""

from __future__ import annotations

import msgspec

from topics.topic import FLEET, Topic
from topics.wire import Count, Message, Sequence, Step


class StreamTrimming(Message):
    """Messages that are no longer needed are about to be purged from a payload stream: they will not have been lost."""

    stream: str
    below: Sequence  # every message below this sequence goes
    # Trajectories whose messages below this sequence go, though they lie above `below`.
    ended: dict[str, Sequence] = msgspec.field(default_factory=dict)


class StreamTrimmed(Message):
    """Messages that are no longer needed were purged from a payload stream, with the blobs that they named."""

    stream: str
    below: Sequence  # every message below this sequence is gone
    messages: Count  # gone now; those at or above `below` are progress that nothing continues any more
    bytes: Count  # by which the payload streams shrank; what was stored meanwhile makes it smaller
    chunks: Count = 0  # of blobs


class CheckpointRequested(Message):
    """A checkpoint is wanted before its turn: what was trained up to it need not be kept any longer."""

    after: Step  # step of the newest checkpoint there is; the request is met by one of a later step
    reason: str


class AdmissionPaused(Message):
    """Until it is resumed, no more groups are open than the next batch takes."""

    reason: str


class AdmissionResumed(Message):
    """There is room again."""

    reason: str


STREAM_TRIMMING = Topic(
    "stream.trimming", StreamTrimming, FLEET, publishers=("supervisor",), subscribers=("monitor", "supervisor")
)
STREAM_TRIMMED = Topic(
    "stream.trimmed", StreamTrimmed, FLEET, publishers=("supervisor",), subscribers=("monitor", "supervisor")
)
CHECKPOINT_REQUESTED = Topic(
    "checkpoint.requested",
    CheckpointRequested,
    FLEET,
    publishers=("supervisor",),
    subscribers=("learner", "supervisor"),
)
ADMISSION_PAUSED = Topic(
    "admission.paused",
    AdmissionPaused,
    FLEET,
    publishers=("supervisor",),
    subscribers=("prompter", "monitor", "supervisor"),
)
ADMISSION_RESUMED = Topic(
    "admission.resumed",
    AdmissionResumed,
    FLEET,
    publishers=("supervisor",),
    subscribers=("prompter", "monitor", "supervisor"),
)
