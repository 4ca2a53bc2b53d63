"""Tensors in host memory as safetensors files: one pass that writes and hashes, several files at once.

A tensor is hashed by xxh3_128 over its bytes, a file by xxh3_64. Threads work side by side: hashing and writing hold no
lock of the interpreter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from asyncrl.weights.folders import Folder

T = TypeVar("T")
R = TypeVar("R")

_BLOCK_BYTES = 1 << 22  # hashed and written while it is in the processor's cache
_FILE_BYTES = 1 << 29  # above that another file begins: one file is written by one thread
_THREADS = min(16, os.cpu_count() or 1)
_ALIGNED = 8  # bytes: where the tensors of a file begin
_RANK = re.compile(r"-rank\d+\Z")  # see `stem_of_share`
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Types that tensors of a version may have, as torch names them, and as safetensors does."""


FILE = "file"
"""Replaces the dtype in manifest lines of further files."""

_EXPONENTS: dict[str, tuple[type[np.unsignedinteger], Any]] = {  # all of these bits are set in NaN and infinity alone
    "float64": (np.uint64, np.uint64(0x7FF0 << 48)),
    "float32": (np.uint32, np.uint32(0x7F80 << 16)),
    "bfloat16": (np.uint16, np.uint16(0x7F80)),
    "float16": (np.uint16, np.uint16(0x7C00)),
}


class HostTensor(NamedTuple):
    """A tensor whose bytes lie in host memory."""

    name: str
    dtype: str  # "float32"
    shape: list[int]
    content: npt.NDArray[np.uint8]  # [bytes]


Files = Mapping[str, Sequence[HostTensor]]
"""Tensors by the stem of the file that holds them: `model` for `model.safetensors`; see `stem_of_share`."""


def stem_of_share(stem: str, rank: int, ranks: int) -> str:
    """Return the stem of the file that holds the tensors which one of several ranks writes: `model-rank1`."""
    return f"{stem}-rank{rank}" if ranks > 1 else stem


class TensorRecord(msgspec.Struct, frozen=True):
    """One line of a manifest."""

    name: str
    dtype: str  # "float32", or `FILE`
    shape: list[int]  # of a file: its bytes
    digest: str  # xxh3_128 of its bytes, hex


class FileRecord(msgspec.Struct, frozen=True):
    """One file."""

    bytes: int
    xxh3: str  # xxh3_64, hex


class WrittenFile(msgspec.Struct, frozen=True):
    """One file of tensors that is written."""

    name: str
    stem: str  # of all files that hold tensors of its kind: "model"
    record: FileRecord
    bytes: int  # of its tensors
    tensors: list[TensorRecord]


class Written(NamedTuple):
    """Files that are on disk, and the tensors in them."""

    manifest: bytes
    files: dict[str, FileRecord]  # by name


class _Entry(msgspec.Struct, frozen=True):
    """One tensor in the header of a safetensors file; other entries lack these fields."""

    dtype: str = ""
    shape: list[int] = []
    data_offsets: tuple[int, int] = (0, 0)  # after the header


class _Part(NamedTuple):
    name: str  # of the file
    stem: str
    tensors: Sequence[HostTensor]


def write_tensors(folder: Folder, files: Files) -> Written:
    """Write tensors into a folder.

    The tensors of a stem that are large become several files, with an index as Hugging Face models have it.

    Raises:
        OSError: the disk refused it.
    """
    written = write_files(folder, files)
    return Written(manifest_of_files(written), records_of(written) | write_indexes(folder, written))


def write_files(folder: Folder, files: Files) -> list[WrittenFile]:
    """Write tensors into a folder in one pass, which hashes them; `write_indexes` completes them.

    Raises:
        OSError: the disk refused it.
    """
    return at_once(partial(_write_part, folder), [part for stem, held in files.items() for part in _parts(stem, held)])


def write_indexes(folder: Folder, written: Sequence[WrittenFile]) -> dict[str, FileRecord]:
    """Write an index for each stem whose tensors are in several files; returns their records.

    Raises:
        OSError: the disk refused it.
    """
    records: dict[str, FileRecord] = {}
    for stem in dict.fromkeys(file.stem for file in written):
        own = [file for file in written if file.stem == stem]
        if [file.name for file in own] != [f"{stem}.safetensors"]:
            places = {tensor.name: file.name for file in own for tensor in file.tensors}
            total = sum(file.bytes for file in own)
            index = msgspec.json.encode({"metadata": {"total_size": total}, "weight_map": places})
            name = f"{stem}.safetensors.index.json"
            with folder.file(name) as sink:
                sink.write(index)
            records[name] = FileRecord(len(index), xxhash.xxh3_64_hexdigest(index))
    return records


def records_of(written: Sequence[WrittenFile]) -> dict[str, FileRecord]:
    """Return the records of files by their names."""
    return {file.name: file.record for file in written}


def manifest_of_files(written: Sequence[WrittenFile]) -> bytes:
    """Return the manifest of all tensors in files."""
    return manifest_of_records([record for file in written for record in file.tensors])


def manifest_of(files: Files) -> bytes:
    """Return the manifest of tensors: a line of JSON for each, in the order of their names."""
    return manifest_of_records(tensor_records(files))


def tensor_records(files: Files) -> list[TensorRecord]:
    """Return the lines of a manifest, in the order of the tensors."""
    return at_once(_hashed, [tensor for tensors in files.values() for tensor in tensors])


def manifest_of_records(records: Sequence[TensorRecord]) -> bytes:
    """Return the manifest with these lines: equal for any files and ranks that hold the tensors."""
    ordered = sorted(records, key=lambda record: record.name)
    return b"".join(msgspec.json.encode(record) + b"\n" for record in ordered)


def file_line(name: str, content: bytes) -> TensorRecord:
    """Return the manifest line of a further file."""
    return TensorRecord(name, FILE, [len(content)], xxhash.xxh3_128_hexdigest(content))


def first_not_finite(files: Files) -> str:
    """Return the name of a tensor with values that are not finite; empty if all are finite."""
    tensors = [tensor for tensors in files.values() for tensor in tensors]
    found = at_once(_is_finite, tensors)
    return next((tensor.name for tensor, finite in zip(tensors, found, strict=True) if not finite), "")


def read_manifest(files: Sequence[Path]) -> bytes:
    """Return the manifest of the tensors in safetensors files, which are read and hashed.

    Raises:
        OSError, ValueError: a file cannot be read, or is no safetensors file.
    """
    return manifest_of({"": [tensor for path in files for tensor in tensors_in(path)]})


def digest_of(manifest: bytes) -> str:
    """Identity of the tensors that have this manifest: 32 hexadecimal digits."""
    return str(xxhash.xxh3_128_hexdigest(manifest))


def file_record(path: Path) -> FileRecord:
    """Return size and hash of a file.

    Raises:
        OSError: it cannot be read.
    """
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
        return FileRecord(file.tell(), digest.hexdigest())


def at_once(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Results in the order of the items, which several threads share."""
    if len(items) <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(_THREADS, len(items))) as pool:
        return list(pool.map(function, items))


def _parts(stem: str, tensors: Sequence[HostTensor]) -> list[_Part]:
    """Tensors by file: one file, or several if they are large."""
    parts: list[list[HostTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if parts[-1] and size + tensor.content.nbytes > _FILE_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.content.nbytes
    whole, count = _RANK.sub("", stem), len(parts)
    if count == 1:
        return [_Part(f"{stem}.safetensors", whole, parts[0])]
    return [
        _Part(f"{stem}-{number:05d}-of-{count:05d}.safetensors", whole, part) for number, part in enumerate(parts, 1)
    ]


def _write_part(folder: Folder, part: _Part) -> WrittenFile:
    header = _header(part.tensors)
    digest, records, size = xxhash.xxh3_64(header), list[TensorRecord](), len(header)
    with folder.file(part.name) as file:
        file.write(header)
        for tensor in part.tensors:
            own = xxhash.xxh3_128()
            for block in _blocks(tensor):
                own.update(block)
                digest.update(block)
                file.write(block)
            size += tensor.content.nbytes
            records.append(TensorRecord(tensor.name, tensor.dtype, tensor.shape, own.hexdigest()))
    return WrittenFile(part.name, part.stem, FileRecord(size, digest.hexdigest()), size - len(header), records)


def _header(tensors: Sequence[HostTensor]) -> bytes:
    """Return the beginning of a safetensors file: its length, and the place of each tensor."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.content.nbytes
        entries[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [begin, end],
        }
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def tensors_in(path: Path, mode: Literal["r", "r+"] = "r") -> Iterator[HostTensor]:
    """Tensors in a safetensors file, which is mapped; with "r+" writes to them reach the file.

    Raises:
        OSError, ValueError: it cannot be read, or is no safetensors file.
    """
    content = np.memmap(path, np.uint8, mode)
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    names = {short: dtype for dtype, short in DTYPES.items()}
    try:
        entries = msgspec.json.decode(content[8:start].tobytes(), type=dict[str, _Entry])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path.name} is no safetensors file: {error}") from error
    for name, entry in entries.items():
        if name != "__metadata__":
            if entry.dtype not in names:
                raise ValueError(f"{path.name}: {name} has dtype {entry.dtype!r}, expected one of {[*names]}")
            begin, end = entry.data_offsets
            yield HostTensor(name, names[entry.dtype], entry.shape, content[start + begin : start + end])


def _blocks(tensor: HostTensor) -> Iterator[memoryview]:
    view = tensor.content.data
    for start in range(0, len(view), _BLOCK_BYTES):
        yield view[start : start + _BLOCK_BYTES]


def _hashed(tensor: HostTensor) -> TensorRecord:
    return TensorRecord(tensor.name, tensor.dtype, tensor.shape, xxhash.xxh3_128_hexdigest(tensor.content.data))


def _is_finite(tensor: HostTensor) -> bool:
    exponent = _EXPONENTS.get(tensor.dtype)
    if exponent is None:
        return True
    kind, mask = exponent
    blocks = (np.frombuffer(block, kind) & mask for block in _blocks(tensor))
    return not any(bool((block == mask).any()) for block in blocks)
