"""What a trainer group does for the learner, from the answers of its ranks.

Of a version, a checkpoint and a model each rank writes its share, and the first one completes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from actors.learner.group import TrainerGroup
from actors.learner.rank import Rank, StepResult
from asyncrl.errors import AsyncRLError
from asyncrl.training.anomalies import Usual
from asyncrl.training.checkpoint import Checkpoint
from asyncrl.training.protocol import Offloaded, Trainer
from asyncrl.training.publisher import Kind, Publisher, choice_of
from asyncrl.weights.tensors import digest_of, manifest_of_records
from asyncrl.weights.versions import new_attempt
from topics.weights import WeightsPublished


async def step(group: TrainerGroup, batch: int, usual: Usual | None = None, profile: str = "") -> StepResult:
    """Make one update: see `Rank.step`."""
    return StepResult.merged(await group.ask(Rank.step, batch, usual, profile))


async def rest(group: TrainerGroup) -> Offloaded:
    """Give the device's memory back; returns the bytes of all ranks, and the seconds of the slowest of them."""
    size, wait_s, copy_s, free_s, copied, left = zip(*await group.ask(Trainer.rest), strict=True)
    return Offloaded(sum(size), max(wait_s), max(copy_s), max(free_s), sum(copied), sum(left))


async def copied_digest(group: TrainerGroup) -> str:
    """Return the identity of the copied weights."""
    answers = await group.ask(Publisher.records)
    return digest_of(manifest_of_records([record for records in answers for record in records]))


async def publish_version(
    group: TrainerGroup, lineage: int, version: int, base: str = "", why: str = ""
) -> WeightsPublished:
    """Write the copied weights into the weight store, all ranks as a full version or as a difference.

    Args:
        base: see `Publisher.prepare`.
        why: it has none.

    Raises:
        NonFiniteWeights: a tensor holds values that are not finite; nothing is written.
        CheckpointError: the disk refused it; no partial file remains.
    """
    choice = choice_of(await group.ask(Publisher.prepare, version, base), base, why)
    attempt = new_attempt(lineage, version)
    async with _dropped(group, "version"):
        shares = await group.ask(Publisher.write_version, attempt, choice)
        message: WeightsPublished = await group.ask_first(Publisher.complete_version, attempt, choice, shares)
    return message


async def save_checkpoint(group: TrainerGroup, checkpoint: Checkpoint) -> Path:
    """Write the copied state as a checkpoint, and read it back; returns its directory.

    Raises:
        CheckpointError: the disk refused it; no partial file remains.
    """
    async with _dropped(group, "checkpoint"):
        shares = await group.ask(Publisher.write_checkpoint, checkpoint)
        path: Path = await group.ask_first(Publisher.complete_checkpoint, checkpoint, shares)
    return path


async def export_model(group: TrainerGroup, directory: Path) -> None:
    """Write the copied weights as a model; one that is there is replaced.

    Raises:
        CheckpointError: the disk refused it; no partial file remains.
    """
    async with _dropped(group, "model"):
        shares = await group.ask(Publisher.write_model, directory)
        await group.ask_first(Publisher.complete_model, directory, shares)


@contextlib.asynccontextmanager
async def _dropped(group: TrainerGroup, kind: Kind) -> AsyncIterator[None]:
    """Remove the shares of what some rank could not write."""
    try:
        yield
    except AsyncRLError:
        with contextlib.suppress(AsyncRLError):  # the first one says more
            await group.ask(Publisher.drop, kind)
        raise
