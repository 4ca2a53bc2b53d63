"""Checks that hold for every run that is over."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.log import Record
from asyncrl.bus.merged_reader import Part, read_merged
from asyncrl.bus.server import EmbeddedServer
from harness.runs import Run, command
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.groups import GROUP_DROPPED
from topics.topic import Stream, Topic
from topics.trajectories import TRAJECTORY_DROPPED
from topics.weights import WEIGHTS_PUBLISHED


async def audited_clean(folder: Path, name: str = "short") -> None:
    code, output = await command(folder, "audit", name, "--deep")
    assert (code, f"run {name}: clean" in output.splitlines()) == (0, True), output


@asynccontextmanager
async def topics_left_by(run: Run) -> AsyncIterator[Bus]:
    """The topics of a run that has ended, from the store in its directory."""
    server = EmbeddedServer(run.root)
    bus = await Bus.connect(await server.start(), run.root.name)
    try:
        yield bus
    finally:
        await bus.close()
        await server.stop()


def assert_within_lag(run: Run, max_lag: int) -> None:
    lags = {int(lag) for lag in run.summary["trained_tokens_by_lag"]}
    assert lags
    assert lags <= set(range(max_lag + 1)), run.summary


def assert_consistent(run: Run, *, steps: int, warmup_steps: int) -> None:
    """The figures of a finished run agree with each other and with its rows."""
    summary, rows = run.summary, run.rows()
    dropped = sum(summary["dropped_trajectories_by_reason"].values())
    assert summary["finished"]
    assert [row["step"] for row in rows] == list(range(1 - warmup_steps, steps + 1))
    assert (summary["steps"], summary["warmup_steps"]) == (steps, warmup_steps)
    assert summary["trajectories_trained"] == sum(row["trajectories"] for row in rows if row["stage"] == "rl")
    assert summary["trained_tokens"] == sum(summary["trained_tokens_by_lag"].values()) <= summary["sampled_tokens"]
    assert summary["trajectories_trained"] + dropped <= summary["trajectories_issued"]
    assert sum(summary["failed_trajectories_by_reason"].values()) == summary["trajectories_failed"]
    assert 0 <= (summary["rl_wall_s"] or 0) <= summary["wall_s"]


class Messages:
    """Return the messages of a log, in order."""

    def __init__(self, messages: list[tuple[Topic[Any], Any]]) -> None:
        self._messages = messages

    def on(self, topic: Topic[Any]) -> list[Any]:
        """The messages of one topic."""
        return [message for found, message in self._messages if found is topic]


async def messages_on(bus: Bus, stream: Stream) -> Messages:
    """Read a log; what is sealed under a data key that was erased, or whose blob was purged, is left out."""
    messages: list[tuple[Topic[Any], Any]] = []

    def refuse(record: Record, error: Exception) -> None:
        assert isinstance(error, SecretGone | BlobMissing), f"message {record.sequence} of {stream.name}: {error}"

    await read_merged(bus, [Part(stream)], lambda topic, message, _: messages.append((topic, message)), refuse)
    return Messages(messages)


def assert_audited(batches: Messages, training: Messages, steps: int) -> None:
    """Every batch once, no trajectory twice, one lineage of versions that only rises."""
    packed = batches.on(BATCH_PACKED)
    assert [batch.step for batch in packed] == list(range(-3, steps + 1))
    members = [member.trajectory_id for batch in packed for group in batch.groups for member in group.members]
    dropped = [message.trajectory_id for message in batches.on(TRAJECTORY_DROPPED)]
    assert len(members) == len(set(members))
    assert len(dropped) == len(set(dropped))
    assert not set(members) & set(dropped)
    groups = {member.rsplit("-", 1)[0] for member in members}
    assert not groups & {message.prompt_id for message in batches.on(GROUP_DROPPED)}

    trained = training.on(BATCH_TRAINED)
    assert [batch.step for batch in trained] == list(range(-3, steps + 1))
    assert [batch.batch_sequence for batch in trained] == sorted({batch.batch_sequence for batch in trained})
    published = [(weights.lineage, weights.version) for weights in training.on(WEIGHTS_PUBLISHED)]
    assert published == sorted(set(published))
    assert {version for _, version in published} == set(range(steps + 1))
    assert published[-1][1] == steps
