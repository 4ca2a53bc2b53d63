"""What every weight store does; a second one that keeps versions in memory passes as well."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from asyncrl.weights.files import FileStore
from asyncrl.weights.store import STORES, StorePlace, WeightStore
from asyncrl.weights.tensors import HostTensor, digest_of, manifest_of
from topics.weights import WeightsPublished


class MemoryStore:
    """Versions that last as long as the process."""

    def __init__(self, place: StorePlace) -> None:
        self.names: set[str] = set()

    def publish(self, tensors, source, *, lineage, version):
        digest = digest_of(manifest_of(tensors))
        self.names.add(f"{lineage}-{version}-{digest}")
        return WeightsPublished(lineage, version, digest, "memory", f"{lineage}-{version}-{digest}")


class MemoryChunks:
    """Chunks that last as long as the process."""

    chunk_bytes = 100

    def __init__(self) -> None:
        self.stored: list[tuple[str, dict[str, str], bytes]] = []

    def put(self, name, headers, body):
        assert len(body) <= self.chunk_bytes
        self.stored.append((name, dict(headers), body))

    def flush(self):
        pass


def tensors(value: float) -> dict[str, list[HostTensor]]:
    array = np.full((2, 3), value, np.float32)
    return {"model": [HostTensor("w", "float32", [2, 3], np.frombuffer(array.tobytes(), np.uint8))]}


@pytest.mark.parametrize("made", [*STORES.values(), MemoryStore])
def test_what_every_store_does(made: Callable[[StorePlace], WeightStore], tmp_path: Path):
    store = made(StorePlace(tmp_path, MemoryChunks()))
    published = [store.publish(tensors(version), None, lineage=0, version=version) for version in range(4)]

    assert [message.digest for message in published] == [digest_of(manifest_of(tensors(v))) for v in range(4)]
    assert len({message.location for message in published}) == 4
    assert store.publish(tensors(3), None, lineage=0, version=3).key == published[3].key


def test_old_files_go_and_kept_ones_and_newer_ones_stay(tmp_path: Path):
    store = FileStore(tmp_path)
    published = [store.publish(tensors(version), None, lineage=0, version=version) for version in range(4)]

    kept = {Path(published[1].location).name}
    assert store.prune(kept, (0, 2)) == 2
    assert store.prune(kept, (0, 2)) == 0
    assert store.prune(set(), (0, 3)) == 2
