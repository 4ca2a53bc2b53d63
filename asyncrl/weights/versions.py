"""Versions written to a weight store: the share of each rank, and what the first rank makes of all of them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.weights.adapters import PublishedAdapter
from asyncrl.weights.delta import Delta, DeltaRecord, TensorDelta, describe_delta, write_frames
from asyncrl.weights.folders import Folder
from asyncrl.weights.model_folder import describe_model
from asyncrl.weights.rank_shards import Attempt, StoredFiles
from asyncrl.weights.store import WeightStore
from asyncrl.weights.tensors import (
    Files,
    TensorRecord,
    WrittenFile,
    digest_of,
    manifest_of_records,
    write_files,
)
from asyncrl.weights.verify import write_manifest
from topics.weights import WeightsPublished


class FullShare(msgspec.Struct, frozen=True):
    """The tensors that one rank wrote."""

    stored: StoredFiles
    files: list[WrittenFile]


class DeltaShare(msgspec.Struct, frozen=True):
    """The difference that one rank found."""

    stored: StoredFiles
    file: str  # of its frames
    tensors: list[TensorDelta]
    records: list[TensorRecord]  # of all tensors of the rank


def new_attempt(lineage: int, version: int) -> Attempt:
    """Return an attempt to write a version, with a unique name."""
    return Attempt(lineage, version, secrets.token_hex(8))


def write_share(store: WeightStore, attempt: Attempt, files: Files, rank: int = 0) -> FullShare:
    """Write the tensors of a rank in one pass.

    Raises:
        CheckpointError: they cannot be stored; no files remain.
    """
    with store.share(attempt, rank) as filling:
        written = write_files(filling.folder, files)
    return FullShare(filling.stored, written)


def write_delta_share(store: WeightStore, attempt: Attempt, delta: Delta, rank: int = 0, ranks: int = 1) -> DeltaShare:
    """Write what a rank found changed.

    Raises:
        CheckpointError: it cannot be stored; no files remain.
    """
    with store.share(attempt, rank) as filling:
        name = write_frames(filling.folder, delta, rank, ranks)
    return DeltaShare(filling.stored, name, delta.tensors, delta.records)


def complete(
    store: WeightStore,
    attempt: Attempt,
    shares: Sequence[FullShare],
    source: Path | None,
    config: bytes | None = None,
    adapter: PublishedAdapter | None = None,
) -> WeightsPublished:
    """Make a version of the shares of all ranks; the result may be published.

    Args:
        source: model directory whose configuration and tokenizer belong to the tensors, if there is one.
        config: `config.json` in place of the source's.
        adapter: the tensors are an adapter, which this describes in place of the source.

    Raises:
        CheckpointError: it cannot be stored; no files remain.
    """
    written = [file for share in shares for file in share.files]
    records = [tensor for file in written for tensor in file.tensors]
    manifest = manifest_of_records(records + (adapter.records if adapter is not None else []))

    def describe(folder: Folder) -> None:
        beside = {}
        if adapter is None:
            beside = describe_model(folder, written, source, config)
        else:
            adapter.describe(folder)
        write_manifest(folder, manifest, beside)

    digest = digest_of(manifest)
    place = store.complete(attempt, digest, [share.stored for share in shares], describe)
    adapts = adapter.base.digest if adapter is not None else ""
    return WeightsPublished(attempt.lineage, attempt.version, digest, store.name, place, adapts=adapts)


def complete_delta(
    store: WeightStore, attempt: Attempt, shares: Sequence[DeltaShare], *, run: str, base: str
) -> WeightsPublished:
    """Make a difference of what all ranks found changed.

    Args:
        run: id of the run; a difference belongs to no other.
        base: key of the version that it is a difference to.

    Raises:
        CheckpointError: it cannot be stored; no files remain.
    """
    manifest = manifest_of_records([record for share in shares for record in share.records])
    message = WeightsPublished(attempt.lineage, attempt.version, digest_of(manifest), store.name, "", base=base)
    changed = [tensor for share in shares for tensor in share.tensors]
    record = DeltaRecord(run, base, message.key, changed, tuple(share.file for share in shares))
    message.location = store.complete(
        attempt,
        message.digest,
        [share.stored for share in shares],
        lambda folder: describe_delta(folder, record, manifest),
        delta=True,
    )
    return message


def publish(store: WeightStore, files: Files, source: Path | None, *, lineage: int, version: int) -> WeightsPublished:
    """Write tensors of one process as a version: see `complete`."""
    attempt = new_attempt(lineage, version)
    return complete(store, attempt, [write_share(store, attempt, files)], source)
