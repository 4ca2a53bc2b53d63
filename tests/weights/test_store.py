"""What every weight store does; a second one that keeps versions in memory passes as well."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from asyncrl.weights.store import STORES, WeightStore
from asyncrl.weights.tensors import HostTensor, digest_of, manifest_of
from topics.weights import WeightsPublished


class MemoryStore:
    """Versions that last as long as the process."""

    def __init__(self, root: Path) -> None:
        self.versions: dict[str, tuple[int, int]] = {}

    def publish(self, tensors, source, *, lineage, version):
        digest = digest_of(manifest_of(tensors))
        name = f"{lineage}-{version}-{digest}"
        self.versions[name] = (lineage, version)
        return WeightsPublished(lineage, version, digest, "memory", name)

    def prune(self, keep, newest):
        old = [name for name, number in self.versions.items() if name not in keep and number <= newest]
        for name in old:
            del self.versions[name]
        return len(old)


def tensors(value: float) -> dict[str, list[HostTensor]]:
    array = np.full((2, 3), value, np.float32)
    return {"model": [HostTensor("w", "float32", [2, 3], np.frombuffer(array.tobytes(), np.uint8))]}


@pytest.mark.parametrize("made", [*STORES.values(), MemoryStore])
def test_what_every_store_does(made: Callable[[Path], WeightStore], tmp_path: Path):
    store = made(tmp_path)
    published = [store.publish(tensors(version), None, lineage=0, version=version) for version in range(4)]

    assert [message.digest for message in published] == [digest_of(manifest_of(tensors(v))) for v in range(4)]
    assert len({message.location for message in published}) == 4
    assert store.publish(tensors(3), None, lineage=0, version=3) == published[3]
    kept = {Path(published[1].location).name}
    assert store.prune(kept, (0, 2)) == 2
    assert store.prune(kept, (0, 2)) == 0
    assert store.prune(set(), (0, 3)) == 2
