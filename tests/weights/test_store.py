"""Contract of every kind of weight store; one that keeps versions in memory passes as well."""

import json
import os
import random
from contextlib import contextmanager
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
from msgspec.structs import replace

from actors.engine.fetch import Fetcher
from asyncrl.config.weights_settings import STORES, StoreCapability, WeightsSettings, store_kind
from asyncrl.run.directory import RunFiles
from asyncrl.weights.directories import CheckpointError
from asyncrl.weights.files.store import FileStore
from asyncrl.weights.rank_shards import Attempt, Filling, Sized, StoredFiles, owners
from asyncrl.weights.store import StorePlace, WeightStore
from asyncrl.weights.tensors import HostTensor, digest_of, manifest_of, stem_of_share
from asyncrl.weights.verify import TornVersion, check_version
from asyncrl.weights.versions import FullShare, complete, new_attempt, publish, write_share
from topics.wire import WireError

FOLDER = Path(__file__).parents[2] / "asyncrl" / "weights"
INDEX = "model.safetensors.index.json"


class MemoryStore:
    """Versions that last as long as the process."""

    name = "memory"
    is_local = False

    def __init__(self, place: StorePlace) -> None:
        self._files: dict[tuple[Attempt, int], MemoryFolder] = {}
        self.versions: dict[str, MemoryFolder] = {}

    @contextmanager
    def share(self, attempt, rank):
        filling = Filling(MemoryFolder())
        yield filling
        self._files[attempt, rank] = filling.folder
        filling.stored = StoredFiles(
            rank, attempt.name, {name: len(held) for name, held in filling.folder.files.items()}
        )

    def complete(self, attempt, digest, shares, describe, *, delta=False):
        folder = MemoryFolder()
        for share in shares:
            folder.files |= self._files.pop((attempt, share.rank)).files
        describe(folder)
        self.versions[f"{attempt.name}-{digest}"] = folder
        return f"{attempt.name}-{digest}"

    def check(self, location):
        if location not in self.versions:
            raise WireError(f"{location} is no version")

    async def has(self, location):
        return location in self.versions

    async def read(self, location, into):
        for name, content in self.versions[location].files.items():
            (into / name).write_bytes(content)
        return into


class MemoryFolder:
    """See `Folder`."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}

    @contextmanager
    def file(self, name):
        self.files[name] = bytearray()
        yield Written(self.files[name])


class Written:
    """See `Sink`."""

    def __init__(self, content: bytearray) -> None:
        self.write = content.extend


class MemoryChunks:
    """Chunks that last as long as the process."""

    chunk_bytes = 200

    def __init__(self) -> None:
        self.stored: list[tuple[str, dict[str, str], bytes]] = []

    def put(self, name, headers, body):
        assert len(body) <= self.chunk_bytes
        self.stored.append((name, dict(headers), body))

    def flush(self):
        pass

    async def newest(self, name):
        return next((body for one, _, body in reversed(self.stored) if one == name), None)

    async def read(self, name, take):
        for one, headers, body in self.stored:
            if one == name:
                take(headers, body)


def tensors(value: float) -> dict[str, list[HostTensor]]:
    return {"model": [tensor(name, value) for name in ("w", "v", "u")]}


def tensor(name: str, value: float) -> HostTensor:
    array = np.full((2, 3), value + ord(name), np.float32)
    return HostTensor(name, "float32", [2, 3], np.frombuffer(array.tobytes(), np.uint8))


def shares_of(store: WeightStore, value: float) -> tuple[Attempt, list[FullShare]]:
    """A version that two ranks wrote, but for its end."""
    attempt, held = new_attempt(0, int(value)), tensors(value)["model"]
    return attempt, [
        write_share(store, attempt, {stem_of_share("model", rank, 2): held[rank::2]}, rank) for rank in (0, 1)
    ]


def test_the_stores_that_settings_take_are_the_folders_with_a_description():
    assert get_args(get_type_hints(WeightsSettings)["store"]) == STORES
    assert {path.parent.name for path in FOLDER.glob("*/kind.py")} == set(STORES)


@pytest.mark.parametrize("name", [*STORES, MemoryStore.name])
def test_what_every_store_does(name: str, tmp_path: Path):
    place = StorePlace(tmp_path, MemoryChunks())
    store = MemoryStore(place) if name == MemoryStore.name else store_kind(name).open(place)
    assert store.name == name
    published = [publish(store, tensors(version), None, lineage=0, version=version) for version in range(4)]

    assert [message.digest for message in published] == [digest_of(manifest_of(tensors(v))) for v in range(4)]
    assert len({message.location for message in published}) == 4
    assert publish(store, tensors(3), None, lineage=0, version=3).key == published[3].key
    attempt, shares = shares_of(store, 3)
    assert complete(store, attempt, shares, None).key == published[3].key, "of two ranks as of one"


@pytest.mark.parametrize("name", STORES)
async def test_a_store_that_is_opened_again_has_what_was_written_and_refuses_other_places(name: str, tmp_path: Path):
    place, into = StorePlace(tmp_path, MemoryChunks()), tmp_path / "into"
    into.mkdir()
    published = publish(store_kind(name).open(place), tensors(3), None, lineage=0, version=3)
    store = store_kind(name).open(place)  # as another process does

    store.check(published.location)
    directory = await store.read(published.location, into)

    check_version(directory, published.digest)
    assert store.is_local == (directory == Path(published.location))
    assert not (store.is_local and store_kind(name).can(StoreCapability.HOSTS))
    assert await store.has(published.location)
    assert not await store.has(f"{published.location}0")
    with pytest.raises(WireError, match="its weights lie in"):
        store.check("elsewhere/version")


async def test_an_engine_reads_a_version_by_the_name_of_its_store_and_refuses_others(tmp_path: Path):
    store = MemoryStore(StorePlace(tmp_path, MemoryChunks()))
    fetcher = Fetcher(None, RunFiles(tmp_path))
    fetcher._stores[store.name] = store
    published = publish(store, tensors(3), None, lineage=0, version=3)

    fetcher.check(published)
    directory = await fetcher.directory(published)

    check_version(directory, published.digest)
    for wrong, words in (({"location": "other"}, "other is no version"), ({"store": "tape"}, "files or stream or mem")):
        with pytest.raises(WireError, match=words):
            fetcher.check(replace(published, **wrong))
    fetcher.close()


def test_a_version_of_two_ranks_is_read_as_a_model(tmp_path: Path):
    store = FileStore(tmp_path / "weights")
    attempt, shares = shares_of(store, 3)
    assert not list((tmp_path / "weights").glob("lineage*")), "nobody can read it yet"

    directory = Path(complete(store, attempt, shares, None).location)

    names = ["model-rank0.safetensors", "model-rank1.safetensors"]
    assert sorted(path.name for path in directory.iterdir()) == ["files.json", "manifest.jsonl", *names, INDEX]
    index = json.loads((directory / INDEX).read_text())
    assert index["weight_map"] == {"w": names[0], "v": names[1], "u": names[0]}
    assert index["metadata"]["total_size"] == 72
    check_version(directory, digest_of(manifest_of(tensors(3))))
    assert os.listdir(tmp_path / "weights") == [directory.name]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(Path.unlink, "is missing"), (lambda path: os.truncate(path, 50), "has 50 bytes")],
)
def test_a_torn_share_is_refused_by_the_name_of_its_file(tmp_path: Path, spoil, words: str):
    store = FileStore(tmp_path / "weights")
    attempt, shares = shares_of(store, 3)
    spoil(Path(shares[1].stored.place, "model-rank1.safetensors"))

    with pytest.raises(
        CheckpointError, match=rf"model-rank1.safetensors {words}, expected \d+ bytes; the share of rank 1"
    ):
        complete(store, attempt, shares, None)

    assert not list((tmp_path / "weights").glob("lineage*"))


def test_a_bit_flipped_anywhere_in_a_version_is_found(tmp_path: Path):
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text('{"rope_theta": 1000000}')
    (source / "tokenizer.json").write_text('{"vocab": {"a": 0}}')
    published = publish(FileStore(tmp_path / "store"), tensors(3), source, lineage=0, version=3)
    directory = Path(published.location)
    check_version(directory, published.digest)
    for name, beside in (
        ("model.safetensors", b'"format":"pt"'),
        ("manifest.jsonl", b""),
        ("config.json", b""),
        ("tokenizer.json", b""),
        ("files.json", b""),
    ):
        path = directory / name
        content = path.read_bytes()
        begin = content.index(beside)
        free = range(begin, begin + len(beside))  # says nothing of a tensor
        for place in range(len(content)):
            changed = bytearray(content)
            changed[place] ^= 1 << place % 8
            path.write_bytes(changed)
            if place not in free:
                with pytest.raises(TornVersion):
                    check_version(directory, published.digest)
        path.write_bytes(content)
    check_version(directory, published.digest)
    (directory / "files.json").unlink()  # as of a version that was written before there were such files
    check_version(directory, published.digest)


def test_tensors_are_dealt_out_by_name_and_size_alone_and_evenly():
    rng = random.Random(0)
    sized = [Sized("model", f"layer{number}", rng.randrange(1, 1 << 20)) for number in range(200)]
    sized += [Sized("adapter", f"low{number}", 1 << 22) for number in range(3)]
    shuffled = rng.sample(sized, len(sized))

    found = dict(zip(sized, owners(sized, 4, {"adapter"}), strict=True))

    assert dict(zip(shuffled, owners(shuffled, 4, {"adapter"}), strict=True)) == found
    assert {owner for one, owner in found.items() if one.stem == "adapter"} == {0}
    loads = [
        sum(one.bytes for one, owner in found.items() if (owner, one.stem) == (rank, "model")) for rank in range(4)
    ]
    assert max(loads) - min(loads) < 5e-3 * max(loads)
    assert owners(sized, 1) == [0] * len(sized)


def test_a_tensor_is_written_by_a_rank_that_holds_it_and_all_ranks_write_alike():
    stages = [Sized("model", f"layer{number}", 100, range(number % 2 * 2, number % 2 * 2 + 2)) for number in range(40)]
    experts = [Sized("model", f"expert{number}", 50, (number % 4,)) for number in range(41)]
    anywhere = [Sized("model", "embedding", 330)]

    found = owners(sized := [*anywhere, *stages, *experts], 4)

    assert all(owner in one.holders for one, owner in zip(sized, found, strict=True) if one.holders)
    loads = [sum(one.bytes for one, owner in zip(sized, found, strict=True) if owner == rank) for rank in range(4)]
    assert max(loads) - min(loads) <= 330


def test_old_files_go_and_kept_ones_stay_and_the_newest_which_may_be_written_once_more_in_another_form(tmp_path: Path):
    store = FileStore(tmp_path)
    published = [publish(store, tensors(version), None, lineage=0, version=version) for version in range(4)]

    kept = {Path(published[1].location).name}
    assert store.prune(kept, (0, 2)) == 1
    assert store.prune(kept, (0, 2)) == 0
    assert store.prune(set(), (0, 3)) == 2
