"""The calls by which the learner publishes: every rank writes its share, and the first one completes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from actors.learner.rank import Call, Rank
from asyncrl.training.checkpoint import Checkpoint
from asyncrl.training.publisher import Choice, Kind, Prepared, VersionShare, choice_of
from asyncrl.weights.rank_shards import Attempt
from asyncrl.weights.tensors import TensorRecord, digest_of, manifest_of_records
from asyncrl.weights.versions import FullShare, new_attempt
from topics.weights import WeightsPublished


class CopyWeights(Call[None]):
    """Copy the weights away, for `Digest` and `Publish`, whole ones for `Export`; those before must be written.

    Raises:
        CheckpointError: as `Trainer.copy_weights`.
    """

    on_gpu = True
    whole: bool = False

    def _compute(self, rank: Rank) -> None:
        rank.publisher.copy_weights(whole=self.whole)


class CopyState(Call[None]):
    """Copy weights and optimiser state, for `Save`; the previous copy must be written."""

    on_gpu = True

    def _compute(self, rank: Rank) -> None:
        rank.publisher.copy_state()


class Share(Call[list[list[bytes]]]):
    """Return the copied weights of each rank for other processes of the host: see `Publisher.shared`."""

    answer, concurrent = list[bytes], True

    def _compute(self, rank: Rank) -> list[bytes]:
        return rank.publisher.shared()

    def merged(self, answers: Sequence[list[bytes]]) -> list[list[bytes]]:
        """See `Call`: each rank has separate tensors in separate memory."""
        return list(answers)


class Digest(Call[str]):
    """Return the identity of the copied weights."""

    answer = list[TensorRecord]

    def _compute(self, rank: Rank) -> list[TensorRecord]:
        return rank.publisher.records()

    def merged(self, answers: Sequence[list[TensorRecord]]) -> str:
        """See `Call`: each rank has its own tensors."""
        return digest_of(manifest_of_records([record for records in answers for record in records]))


class Unchanged(Call[bool]):
    """Return whether the copied weights are those of the newest version that the group wrote."""

    answer, concurrent = bool, True

    def _compute(self, rank: Rank) -> bool:
        return rank.publisher.unchanged()

    def merged(self, answers: Sequence[bool]) -> bool:
        """See `Call`: each rank has its own tensors."""
        return all(answers)


class Drop(Call[None]):
    """Remove the shares of what some rank could not write."""

    concurrent = True
    kind: Kind

    def _compute(self, rank: Rank) -> None:
        rank.publisher.drop(self.kind)


class Publish(Call[WeightsPublished]):
    """Write the copied weights into the weight store.

    Raises:
        NonFiniteWeights: a tensor holds values that are not finite; nothing is written.
        CheckpointError: the disk refused it; no partial file remains.
    """

    answer, concurrent = Prepared, True
    lineage: int
    version: int
    base: str = ""  # see `Publisher.prepare`
    why: str = ""  # it has none

    def _compute(self, rank: Rank) -> Prepared:
        return rank.publisher.prepare(self.version, self.base)

    def following(self, answers: Sequence[Prepared]) -> Call[WeightsPublished]:
        """See `Call`: all ranks write a full version, or a difference."""
        choice = choice_of(answers, self.base, self.why)
        return WriteVersion(new_attempt(self.lineage, self.version), choice)


class WriteVersion(Call[WeightsPublished]):
    """Write the shares of a version; see `Publish`."""

    answer, concurrent = VersionShare, True
    undone = Drop("version")
    attempt: Attempt
    choice: Choice

    def _compute(self, rank: Rank) -> VersionShare:
        return rank.publisher.write_version(self.attempt, self.choice)

    def following(self, answers: Sequence[VersionShare]) -> Call[WeightsPublished]:
        return CompleteVersion(self.attempt, self.choice, list(answers))


class CompleteVersion(Call[WeightsPublished]):
    """Make a version of the shares; see `Publish`."""

    answer, every_rank, concurrent = WeightsPublished, False, True
    undone = Drop("version")
    attempt: Attempt
    choice: Choice
    shares: list[VersionShare]

    def _compute(self, rank: Rank) -> WeightsPublished:
        return rank.publisher.complete_version(self.attempt, self.choice, self.shares)


class Save(Call[str]):
    """Write the copied state as a checkpoint, and read it back; returns its directory.

    Raises:
        CheckpointError: the disk refused it; no partial file remains.
    """

    answer, concurrent = FullShare, True
    undone = Drop("checkpoint")
    checkpoint: Checkpoint

    def _compute(self, rank: Rank) -> FullShare:
        return rank.publisher.write_checkpoint(self.checkpoint)

    def following(self, answers: Sequence[FullShare]) -> Call[str]:
        return CompleteSave(self.checkpoint, list(answers))


class CompleteSave(Call[str]):
    """Make a checkpoint of the shares; see `Save`."""

    answer, every_rank, concurrent = str, False, True
    undone = Drop("checkpoint")
    checkpoint: Checkpoint
    shares: list[FullShare]

    def _compute(self, rank: Rank) -> str:
        return str(rank.publisher.complete_checkpoint(self.checkpoint, self.shares))


class Export(Call[None]):
    """Write the copied weights as a model; one that is there is replaced.

    Raises:
        CheckpointError: the disk refused it; no partial file remains.
    """

    answer = FullShare
    undone = Drop("model")
    directory: str

    def _compute(self, rank: Rank) -> FullShare:
        return rank.publisher.write_model(Path(self.directory))

    def following(self, answers: Sequence[FullShare]) -> Call[None]:
        return CompleteExport(self.directory, list(answers))


class CompleteExport(Call[None]):
    """Make a model of the shares; see `Export`."""

    every_rank = False
    undone = Drop("model")
    directory: str
    shares: list[FullShare]

    def _compute(self, rank: Rank) -> None:
        rank.publisher.complete_model(Path(self.directory), self.shares)


_Copy: TypeAlias = CopyWeights | CopyState | Share | Digest | Unchanged | Drop
_Files: TypeAlias = Publish | WriteVersion | CompleteVersion | Save | CompleteSave | Export | CompleteExport
Publication: TypeAlias = _Copy | _Files
"""Any of these calls."""
