"""Differences between two versions of the same tensors: lossless, compressed, and checked by the digest of the result.

A difference is a folder: `delta.json` names run, base and tensors, `delta.bin` holds a zstd frame for each tensor that
changed, or a file for each rank that wrote some, and `manifest.jsonl` is that of the result. It is applied to a copy of
the base's directory, never to the base itself, so a process that dies leaves a complete base.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from asyncrl.errors import UNREADABLE
from asyncrl.weights.folders import Folder
from asyncrl.weights.tensors import Files, HostTensor, TensorRecord, at_once, stem_of_share, tensor_records, tensors_in
from asyncrl.weights.verify import MANIFEST, TornVersion, check_version

_RECORD, _CONTENT = "delta.json", "delta.bin"
_LEVEL = 1  # of zstd: higher ones cost more time than they save on any link
_SPARSE = 1 / 8  # share of changed elements up to which their positions take less than the whole tensor

Bytes = npt.NDArray[np.uint8]


class TensorDelta(msgspec.Struct, frozen=True):
    """The difference of one tensor."""

    name: str
    encoding: Literal["overwrite", "xor"]
    changed: int  # elements
    bytes: int  # of its frame, which follows those of the tensors before


class DeltaRecord(msgspec.Struct, frozen=True):
    """The parts of a difference, and its two versions."""

    run: str
    base: str  # key of the version that it is applied to
    key: str  # of the result
    tensors: list[TensorDelta]
    files: tuple[str, ...] = (_CONTENT,)  # with their frames, one after the other


class Base:
    """The tensors of the newest version, in memory that is kept from version to version."""

    def __init__(self) -> None:
        self.key = ""
        self.files: dict[str, list[HostTensor]] = {}

    def keep(self, key: str, files: Files) -> None:
        """Copy the tensors of a version, in place of those before."""
        self.key = ""
        held = {(stem, tensor.name): tensor.content for stem, tensors in self.files.items() for tensor in tensors}
        self.files = {
            stem: [_copied(tensor, held.get((stem, tensor.name))) for tensor in files[stem]] for stem in files
        }
        self.key = key


class Delta(NamedTuple):
    """A difference in memory, of all tensors or of a rank's."""

    tensors: list[TensorDelta]
    frames: list[bytes]
    records: list[TensorRecord]  # of the result

    @property
    def bytes(self) -> int:
        """Return the size of all frames."""
        return sum(map(len, self.frames))


def encode(base: Files, files: Files) -> Delta:
    """Return the changed tensors between two versions; empty if they are equal.

    Raises:
        ValueError: they are not versions of the same tensors.
    """
    before = {tensor.name: tensor for tensors in base.values() for tensor in tensors}
    after = [tensor for tensors in files.values() for tensor in tensors]
    if [(t.name, t.dtype, t.shape) for t in before.values()] != [(t.name, t.dtype, t.shape) for t in after]:
        raise ValueError("the base has other tensors")
    found = at_once(_encode, [(before[tensor.name], tensor) for tensor in after])
    changed = [one for one in found if one is not None]
    return Delta([record for record, _ in changed], [frame for _, frame in changed], tensor_records(files))


def write_frames(folder: Folder, delta: Delta, rank: int, ranks: int) -> str:
    """Write what one of several ranks found changed into a folder; returns the name of the file."""
    name = f"{stem_of_share(_CONTENT.removesuffix('.bin'), rank, ranks)}.bin"
    with folder.file(name) as file:
        for frame in delta.frames:
            file.write(frame)
    return name


def describe_delta(folder: Folder, record: DeltaRecord, manifest: bytes) -> None:
    """Complete a difference, whose frames are written.

    Args:
        manifest: of the result.
    """
    with folder.file(MANIFEST) as file:
        file.write(manifest)
    with folder.file(_RECORD) as file:
        file.write(msgspec.json.encode(record))


def apply_delta(source: Path, base: Path, target: Path, *, expected: DeltaRecord) -> None:
    """Make a version of its base and a difference.

    Args:
        source: directory of the difference.
        base: directory of the base; it is not changed.
        target: an existing directory, which is filled.
        expected: run, base and key that the difference must have; its tensors do not matter.

    Raises:
        TornVersion: the difference belongs to another run or base, is damaged, or its result is not the version.
        OSError: the disk refused it.
    """
    try:
        record = msgspec.json.decode((source / _RECORD).read_bytes(), type=DeltaRecord)
        content = np.concatenate(
            [np.zeros(0, np.uint8), *(np.fromfile(source / Path(name).name, np.uint8) for name in record.files)]
        )
        manifest = (source / MANIFEST).read_bytes()
    except (OSError, *UNREADABLE) as error:
        raise TornVersion(f"{source.name} is no difference: {error}") from error
    for name in ("run", "base", "key"):
        found, wanted = getattr(record, name), getattr(expected, name)
        if found != wanted:
            raise TornVersion(f"{source.name} has {name} {found!r}, expected {wanted!r}")
    try:
        for path in base.iterdir():
            if path.name != MANIFEST:
                shutil.copyfile(path, target / path.name)
    except FileNotFoundError as error:
        raise TornVersion(f"{source.name} is a difference to {base.name}, which is not there any more") from error
    (target / MANIFEST).write_bytes(manifest)
    _apply(record.tensors, content, target)
    check_version(target, expected.key.split(":")[2])


def _apply(records: Sequence[TensorDelta], content: Bytes, target: Path) -> None:
    try:
        held = {tensor.name: tensor for path in target.glob("*.safetensors") for tensor in tensors_in(path, "r+")}
    except ValueError as error:
        raise TornVersion(f"the base cannot be read: {error}") from error
    work: list[tuple[TensorDelta, HostTensor, Bytes]] = []
    end = 0
    for record in records:
        begin, end = end, end + record.bytes
        if record.name not in held or end > len(content):
            raise TornVersion(f"the base has no {record.name}, or the difference ends before it")
        work.append((record, held[record.name], content[begin:end]))
    at_once(_change, work)


def _copied(tensor: HostTensor, memory: Bytes | None) -> HostTensor:
    if memory is None or memory.shape != tensor.content.shape:
        memory = np.empty_like(tensor.content)
    np.copyto(memory, tensor.content)
    return tensor._replace(content=memory)


def _encode(pair: tuple[HostTensor, HostTensor]) -> tuple[TensorDelta, bytes] | None:
    base, tensor = pair
    before, after = _elements(base), _elements(tensor)
    difference = before ^ after
    places = np.flatnonzero(difference)
    if not len(places):
        return None
    sparse = len(places) <= _SPARSE * len(after) and len(after) < 2**32
    if sparse:
        gaps = np.diff(places, prepend=0).astype("<u4")
        content = _planes(gaps) + _planes(after[places])
    else:
        content = _planes(difference)
    frame = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(content)
    return TensorDelta(tensor.name, "overwrite" if sparse else "xor", len(places), len(frame)), frame


def _change(work: tuple[TensorDelta, HostTensor, Bytes]) -> None:
    record, tensor, frame = work
    elements = _elements(tensor)
    size = record.changed * (4 + elements.itemsize) if record.encoding == "overwrite" else elements.nbytes
    try:
        stated = zstandard.frame_content_size(frame.data)
        if stated != size:  # before so much memory is taken
            raise TornVersion(f"the difference of {record.name} is damaged: {stated} bytes, expected {size}")
        found = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame.data), np.uint8)
    except zstandard.ZstdError as error:
        raise TornVersion(f"the difference of {record.name} is damaged: {error}") from error
    if record.encoding == "xor":
        elements ^= _joined(found, elements.dtype)
        return
    places = np.cumsum(_joined(found[: 4 * record.changed], np.dtype("<u4")), dtype=np.int64)
    if len(places) and places[-1] >= len(elements):
        raise TornVersion(f"the difference of {record.name} names element {places[-1]} of {len(elements)}")
    elements[places] = _joined(found[4 * record.changed :], elements.dtype)


def _elements(tensor: HostTensor) -> npt.NDArray[np.unsignedinteger]:
    """Return a tensor's elements as whole numbers of their size.

    Raises:
        TornVersion: its bytes are not those of its shape.
    """
    count, held = math.prod(tensor.shape), tensor.content.nbytes
    size, rest = divmod(held, count) if count else (1, held)
    if rest or size not in (1, 2, 4, 8):
        raise TornVersion(f"{tensor.name} has {held} bytes, which are not those of {count} elements")
    found: npt.NDArray[np.unsignedinteger] = tensor.content.view(f"<u{size}")
    return found


def _planes(elements: npt.NDArray[np.unsignedinteger]) -> bytes:
    """Return all first bytes, then all second bytes and so on: those that rarely change lie together."""
    return np.ascontiguousarray(elements.view(np.uint8).reshape(-1, elements.itemsize).T).tobytes()


def _joined(planes: Bytes, dtype: np.dtype) -> npt.NDArray[np.unsignedinteger]:
    found: npt.NDArray[np.unsignedinteger] = (
        np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).reshape(-1).view(dtype)
    )
    return found
