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
    bytes: Count  # bytes by which the payload streams shrank, minus bytes stored during the purge
    chunks: Count = 0  # of blobs


class CheckpointRequested(Message):
    """A checkpoint is wanted early, so that older batches need not be kept."""

    after: Step  # step of the newest checkpoint there is; the request is met by one of a later step
    reason: str


class AdmissionPaused(Message):
    """Until it is resumed, no more groups are open than the next batch takes."""

    reason: str


class AdmissionResumed(Message):
    """There is room again."""

    reason: str


STREAM_TRIMMING = Topic(StreamTrimming, FLEET, ("supervisor",), ("monitor", "supervisor"))
STREAM_TRIMMED = Topic(StreamTrimmed, FLEET, ("supervisor",), ("monitor", "supervisor"))
CHECKPOINT_REQUESTED = Topic(CheckpointRequested, FLEET, ("supervisor",), ("learner", "supervisor"))
ADMISSION_PAUSED = Topic(AdmissionPaused, FLEET, ("supervisor",), ("prompter", "monitor", "supervisor"))
ADMISSION_RESUMED = Topic(AdmissionResumed, FLEET, ("supervisor",), ("prompter", "monitor", "supervisor"))
