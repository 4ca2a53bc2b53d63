"""Publication of a trainer's versions, checkpoints and models: copied, and written during its next steps.

Each rank writes its share; the first one completes it once all shares are durable.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import zstandard

from asyncrl.training.checkpoint import Checkpoint, check_files, write_checkpoint
from asyncrl.training.protocol import Copied, NonFiniteWeights, Trainer
from asyncrl.weights.delta import Base, Delta, encode
from asyncrl.weights.directories import remove_directory, written_aside
from asyncrl.weights.folders import DiskFolder
from asyncrl.weights.model_folder import describe_model, name_stop_tokens
from asyncrl.weights.rank_shards import Attempt, StoredFiles, drop_share, take_shares, written_share
from asyncrl.weights.store import WeightStore
from asyncrl.weights.tensors import (
    FileRecord,
    TensorRecord,
    digest_of,
    file_record,
    first_not_finite,
    manifest_of_records,
    records_of,
    tensor_records,
    write_files,
    write_indexes,
)
from asyncrl.weights.versions import (
    DeltaShare,
    FullShare,
    complete,
    complete_delta,
    new_attempt,
    write_delta_share,
    write_share,
)
from topics.weights import WeightsPublished

_WORTH = 0.9  # share of the bytes of a full version from which on no difference is written
Kind: TypeAlias = Literal["version", "checkpoint", "model"]


class Member(NamedTuple):
    """One of the ranks of a trainer group."""

    rank: int
    ranks: int  # how many there are


ALONE = Member(0, 1)


class Prepared(msgspec.Struct, frozen=True):
    """The tensors of a rank that are to be written."""

    bytes: int
    encode_s: float
    deltas: bool  # whether versions may be differences
    difference: int | None = None  # bytes, where the rank has the base of one


class Choice(msgspec.Struct, frozen=True):
    """The form in which all ranks write a version."""

    base: str  # key of the version that the difference is to; empty for a full version
    bytes: int
    encode_s: float
    reason: str


class VersionShare(msgspec.Struct, frozen=True):
    """The part of a version that a rank wrote: one of the two."""

    write_s: float
    full: FullShare | None = None
    delta: DeltaShare | None = None


def choice_of(prepared: Sequence[Prepared], base: str, why: str = "") -> Choice:
    """Return the form to write: the difference, if every rank has the base and it is smaller.

    Args:
        base: key of the possible base version; empty for a full version.
        why: it is to be full.
    """
    size, encode_s = sum(one.bytes for one in prepared), max(one.encode_s for one in prepared)
    moved = [one.difference for one in prepared if one.difference is not None]
    if len(moved) == len(prepared) and size:
        if sum(moved) <= _WORTH * size:
            return Choice(base, sum(moved), encode_s, "")
        return Choice("", size, encode_s, f"full: the difference has {sum(moved) / size:.0%} of its bytes")
    reason = f"full: {'no base' if base else why}" if prepared[0].deltas else ""
    return Choice("", size, encode_s, reason)


class Publisher:
    """Copies of a rank's share of the weights and state, and the files that are made of them.

    The trainer may step as soon as a copy returns. Writing a copy must be complete before the next copy of its kind;
    copies of weights and of state are separate.
    """

    def __init__(
        self, trainer: Trainer, *, store: WeightStore, checkpoints: Path, run: str = "", member: Member = ALONE
    ) -> None:
        self._run = run  # its id, where versions may be differences to the one before, whose weights are kept for that
        self._member = member  # the rank whose share this is
        self._base = Base()
        self._delta: Delta | None = None  # that is about to be written
        self._digests: dict[str, str] = {}  # of the tensors of the newest version that was written here
        self._trainer = trainer
        self._store = store  # of the versions
        self._checkpoints = checkpoints  # folder of the checkpoints
        self._weights: Copied
        self._state: Copied
        self._left: dict[Kind, StoredFiles] = {}  # shares that were written here

    def copy_weights(self, whole: bool = False) -> None:
        """Copy the weights away, for `records` and versions; whole ones for models.

        Raises:
            CheckpointError: as `Trainer.copy_weights`.
        """
        self._weights = self._trainer.copy_weights(whole=whole)

    def copy_state(self) -> None:
        """Copy weights and optimiser away, for checkpoints."""
        self._state = self._trainer.copy_state()

    def records(self) -> list[TensorRecord]:
        """Return names and digests of the copied weights of this rank, and of what describes them, of the first."""
        adapter = self._trainer.adapter if self._member.rank == 0 else None
        return tensor_records(self._weights.files()) + (adapter.records if adapter is not None else [])

    def unchanged(self) -> bool:
        """Return whether the copied weights of this rank are those of the newest version that was written here.

        The small tensors are hashed first, up to one that has changed.
        """
        tensors = [tensor for held in self._weights.files().values() for tensor in held]
        return all(
            tensor_records({"": [tensor]})[0].digest == self._digests.get(tensor.name)
            for tensor in sorted(tensors, key=lambda tensor: tensor.content.nbytes)
        )

    def shared(self) -> list[bytes]:
        """Return the copied weights of this rank for other processes of the host: see `Copied.shared`."""
        return [zstandard.ZstdCompressor(level=1).compress(call) for call in self._weights.shared()]

    def prepare(self, version: int, base: str = "") -> Prepared:
        """Check the copied weights, and find what changed.

        Args:
            base: key of a version; if it is the newest written here, the difference to it is made.

        Raises:
            NonFiniteWeights: a tensor holds values that are not finite.
        """
        files = self._weights.files()
        wrong = first_not_finite(files)
        if wrong:
            raise NonFiniteWeights(f"version {version}: tensor {wrong} holds values that are not finite")
        size, began = sum(one.content.nbytes for held in files.values() for one in held), time.monotonic()
        self._delta = None
        if base and base.rpartition(":")[0] == self._base.key:
            self._delta = encode(self._base.files, files)
        seconds = round(time.monotonic() - began, 4)
        return Prepared(size, seconds, bool(self._run), self._delta.bytes if self._delta is not None else None)

    def write_version(self, attempt: Attempt, choice: Choice) -> VersionShare:
        """Write the share of this rank into the weight store.

        Raises:
            CheckpointError: the disk refused it; no files remain.
        """
        began, member, files = time.monotonic(), self._member, self._weights.files()
        full = delta = None
        if choice.base and self._delta is not None:
            delta = write_delta_share(self._store, attempt, self._delta, member.rank, member.ranks)
            self._left["version"], records = delta.stored, delta.records
        else:
            full = write_share(self._store, attempt, files, member.rank)
            self._left["version"], records = full.stored, [one for file in full.files for one in file.tensors]
        self._digests = {record.name: record.digest for record in records}
        self._delta = None
        if self._run:
            self._base.keep(f"{attempt.lineage}:{attempt.version}", files)
        return VersionShare(time.monotonic() - began, full, delta)

    def complete_version(self, attempt: Attempt, choice: Choice, shares: Sequence[VersionShare]) -> WeightsPublished:
        """Make a version of the shares of all ranks; the result may be published.

        Raises:
            CheckpointError: a share is torn, or the disk refused it; no files remain.
        """
        began, reason = time.monotonic(), choice.reason
        deltas = [share.delta for share in shares if share.delta is not None]
        if choice.base:
            message = complete_delta(self._store, attempt, deltas, run=self._run, base=choice.base)
            changed = sum(one.changed for share in deltas for one in share.tensors)
            reason = f"difference: {changed} elements changed"
        else:
            full = [share.full for share in shares if share.full is not None]
            trainer = self._trainer
            message = complete(self._store, attempt, full, trainer.source, trainer.config, trainer.adapter)
        write_s = round(max(share.write_s for share in shares) + time.monotonic() - began, 4)
        return msgspec.structs.replace(
            message, bytes=choice.bytes, choice=reason, encode_s=choice.encode_s, write_s=write_s
        )

    def write_checkpoint(self, checkpoint: Checkpoint) -> FullShare:
        """Write the copied state of this rank, and read it back: what cannot be read back must not count.

        Raises:
            CheckpointError: the disk refused it.
        """
        with written_share(self._checkpoints / checkpoint.name, self._member.rank) as filling:
            written = write_files(filling.folder, self._state.files())
        self._left["checkpoint"] = filling.stored
        check_files(Path(filling.stored.place), records_of(written))
        return FullShare(filling.stored, written)

    def complete_checkpoint(self, checkpoint: Checkpoint, shares: Sequence[FullShare]) -> Path:
        """Make a checkpoint of the shares of all ranks; returns its directory.

        Raises:
            CheckpointError: a share is torn, or the disk refused it; no files remain.
        """

        def fill(aside: Path) -> dict[str, FileRecord]:
            take_shares([share.stored for share in shares], aside)
            folder, written = DiskFolder(aside), [file for share in shares for file in share.files]
            records = records_of(written)
            for name, content in self._trainer.beside_state.items():
                with folder.file(name) as file:
                    file.write(content)
                records[name] = file_record(aside / name)
            return records | write_indexes(folder, written)

        path = write_checkpoint(self._checkpoints, checkpoint, fill)
        for share in shares:  # if it already exists
            drop_share(share.stored)
        return path

    def write_model(self, directory: Path) -> FullShare:
        """Write the copied weights of this rank for a model.

        Raises:
            CheckpointError: the disk refused it; no files remain.
        """
        with written_share(directory, self._member.rank) as filling:
            written = write_files(filling.folder, self._weights.files())
        self._left["model"] = filling.stored
        return FullShare(filling.stored, written)

    def complete_model(self, directory: Path, shares: Sequence[FullShare]) -> None:
        """Make a model of the shares of all ranks; one that is there is replaced.

        Raises:
            CheckpointError: a share is torn, or the disk refused it; no files remain.
        """
        if directory.exists():  # of fewer steps, or of a learner that died before it announced it
            remove_directory(directory)
        with written_aside(directory) as aside:
            take_shares([share.stored for share in shares], aside.path)
            written = [file for share in shares for file in share.files]
            describe_model(DiskFolder(aside.path), written, self._trainer.source, self._trainer.config)
            name_stop_tokens(aside.path)

    def drop(self, kind: Kind) -> None:
        """Remove the share of this rank of what another rank could not write."""
        if kind in self._left:
            drop_share(self._left.pop(kind))

    def digest(self) -> str:
        """Return the identity of the copied weights of one rank alone."""
        return digest_of(manifest_of_records(self.records()))

    def publish(self, *, lineage: int, version: int, base: str = "") -> WeightsPublished:
        """Write a version of one rank alone: see `prepare`, `write_version`, `complete_version`."""
        attempt = new_attempt(lineage, version)
        choice = choice_of([self.prepare(version, base)], base, "asked for")
        return self.complete_version(attempt, choice, [self.write_version(attempt, choice)])

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint of one rank alone: see `write_checkpoint`, `complete_checkpoint`."""
        return self.complete_checkpoint(checkpoint, [self.write_checkpoint(checkpoint)])

    def export(self, directory: Path) -> None:
        """Write a model of one rank alone: see `write_model`, `complete_model`."""
        self.complete_model(directory, [self.write_model(directory)])
