"""Tensors on disk: one pass that writes and hashes, in files that every reader of safetensors reads."""

import json

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file

from asyncrl.weights import tensors
from asyncrl.weights.folders import DiskFolder
from asyncrl.weights.tensors import HostTensor, digest_of, file_record, manifest_of, read_manifest, write_tensors


def held(name, array):
    return HostTensor(name, str(array.dtype), list(array.shape), np.frombuffer(array.tobytes(), np.uint8))


ARRAYS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.array(7, np.int64),
    "c": np.arange(200, dtype=np.float32),
    "d": np.zeros((0, 4), np.float32),
}
HELD = [held(name, array) for name, array in ARRAYS.items()]


def digest(*named):
    return digest_of(manifest_of({"model": [held(name, array) for name, array in named]}))


def test_the_digest_sees_names_shapes_types_and_bytes_but_no_order():
    one, two = np.arange(6, dtype=np.float32), np.array(2.0, np.float32)
    same = digest(("a", one), ("b", two))

    assert len(same) == 32
    assert digest(("b", two), ("a", one.copy())) == same
    others = [
        [("a", one), ("c", two)],
        [("a", one.reshape(2, 3)), ("b", two)],
        [("a", one.view(np.int32)), ("b", two)],
        [("a", one[::-1]), ("b", two)],
        [("a", one)],
    ]
    assert len({same, *(digest(*other) for other in others)}) == 6


@pytest.mark.parametrize("file_bytes", [1 << 20, 100])
def test_what_is_written_is_read_by_other_programs_and_hashed_on_the_way(tmp_path, monkeypatch, file_bytes):
    monkeypatch.setattr(tensors, "_FILE_BYTES", file_bytes)
    monkeypatch.setattr(tensors, "_BLOCK_BYTES", 64)

    written = write_tensors(DiskFolder(tmp_path), {"model": HELD, "optimizer": HELD[:1]})

    assert sorted(written.files) == sorted(path.name for path in tmp_path.iterdir())
    assert written.files == {path.name: file_record(path) for path in tmp_path.iterdir()}
    paths = sorted(tmp_path.glob("model*.safetensors"))
    found = {name: array for path in paths for name, array in load_file(path).items()}
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert np.array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    digests = [json.loads(line)["digest"] for line in read_manifest(paths).splitlines()]
    assert digests == [xxhash.xxh3_128_hexdigest(ARRAYS[name].tobytes()) for name in sorted(ARRAYS)]
    assert read_manifest(paths) == manifest_of({"model": HELD})
    if file_bytes == 100:
        assert len(paths) == 3
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: path.name for path in paths for name in load_file(path)}
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in ARRAYS.values())
