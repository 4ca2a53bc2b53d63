"""A difference, or its base, that is damaged anywhere is a torn version, or makes the right one: nothing else."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from asyncrl.weights import versions
from asyncrl.weights.delta import DeltaRecord, apply_delta, encode
from asyncrl.weights.files.store import FileStore
from asyncrl.weights.tensors import HostTensor
from asyncrl.weights.verify import MANIFEST, TornVersion, check_version
from topics.weights import WeightsPublished

RUN = "demo"


class Pair(NamedTuple):
    """A version, and the next one as a difference to it."""

    base: WeightsPublished
    delta: WeightsPublished


def tensor(name: str, dtype: str, array: np.ndarray) -> HostTensor:
    return HostTensor(name, dtype, [*array.shape], np.ascontiguousarray(array).reshape(-1).view(np.uint8))


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Tensors with few and with many changes, without elements, and without a dimension."""
    few = np.arange(96, dtype=np.float32).reshape(12, 8)
    many = np.arange(50, dtype=np.uint16)
    fixed = [tensor("none", "float32", np.zeros((0, 4), np.float32)), tensor("one", "float32", np.array(1.0, "f4"))]
    before = {"model": [tensor("few", "float32", few), tensor("layers.0/many", "bfloat16", many), *fixed]}
    few, many = few.copy(), many + 1
    few[3, 4] = -1.0
    after = {"model": [tensor("few", "float32", few), tensor("layers.0/many", "bfloat16", many), *fixed]}

    store = FileStore(tmp_path / "weights")
    base = versions.publish(store, before, None, lineage=0, version=0)
    found, attempt = encode(before, after), versions.new_attempt(0, 1)
    assert [one.encoding for one in found.tensors] == ["overwrite", "xor"]
    shares = [versions.write_delta_share(store, attempt, found)]
    return Pair(base, versions.complete_delta(store, attempt, shares, run=RUN, base=base.key))


def damaged(content: bytes) -> Iterator[bytes]:
    """A content with a bit of each byte flipped, and cut in many places."""
    for place in range(len(content)):
        yield content[:place] + bytes([content[place] ^ (1 << (7 - place % 8))]) + content[place + 1 :]
    for end in range(0, len(content), 7):
        yield content[:end]


def outcome(pair: Pair, target: Path) -> str:
    """Apply the difference; what it made is looked at by the caller."""
    target.mkdir()
    expected = DeltaRecord(RUN, pair.base.key, pair.delta.key, [])
    try:
        apply_delta(Path(pair.delta.location), Path(pair.base.location), target, expected=expected)
    except TornVersion:
        return "torn"
    check_version(target, pair.delta.digest)
    return "right"


@pytest.mark.parametrize("name", ["delta.json", "delta.bin", MANIFEST])
def test_a_difference_with_a_flipped_byte_or_a_missing_end_is_torn(pair: Pair, name: str, tmp_path: Path):
    path = Path(pair.delta.location) / name
    whole = path.read_bytes()
    assert outcome(pair, tmp_path / "whole") == "right"

    found = set()
    for number, content in enumerate(damaged(whole)):
        path.write_bytes(content)
        found.add(outcome(pair, tmp_path / f"made-{number}"))

    assert found <= {"torn", "right"}
    assert "torn" in found


def test_a_base_with_a_flipped_byte_or_a_missing_end_makes_the_difference_torn(pair: Pair, tmp_path: Path):
    path = Path(pair.base.location) / "model.safetensors"
    whole = path.read_bytes()

    found = set()
    for number, content in enumerate(damaged(whole)):
        path.write_bytes(content)
        found.add(outcome(pair, tmp_path / f"made-{number}"))

    # Right where the byte lies in what the difference overwrites, or in a blank of the header.
    assert found == {"torn", "right"}
