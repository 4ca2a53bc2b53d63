"""A list of tensors in shared memory names constructors of tensors; anything else is refused, and nothing is called."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from asyncrl.weights.shared import View, keep_for_reader, pack_tensors, shared_memory, unpack_tensors
from asyncrl.weights.shared_names import NotShared, check_names
from asyncrl.weights.tensors import DTYPES


class _Calls:
    def __init__(self, *call: object) -> None:
        self._call = call

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self._call[0], self._call[1:]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_type_that_a_version_may_have_are_taken(dtype: str):
    memory = shared_memory(64, torch.device("cpu"))
    (packed,) = pack_tensors(memory, [[View("a", getattr(torch, dtype), (2, 4), 0)]])
    keep_for_reader(memory)

    check_names(packed)

    ((name, tensor),) = unpack_tensors(packed)
    assert (name, str(tensor.dtype), tensor.shape) == ("a", f"torch.{dtype}", (2, 4))


@pytest.mark.parametrize("read", [check_names, unpack_tensors])
def test_a_list_that_names_anything_else_is_refused_before_it_is_called(read: object, tmp_path: Path):
    made = tmp_path / "made"
    planted = pickle.dumps([("a", _Calls(os.mkdir, str(made)))])

    with pytest.raises(NotShared, match=r"posix\.mkdir belongs to no tensor"):
        read(planted)
    assert not made.exists()
    pickle.loads(planted)
    assert made.exists()  # a reader that calls what is named would have done so


def test_what_is_no_list_of_tensors_at_all_is_named():
    with pytest.raises(NotShared, match="no tensors in shared memory"):
        check_names(b"torch")


def test_a_keeper_of_names_that_is_late_is_asked_again_and_one_that_refuses_is_not(monkeypatch: pytest.MonkeyPatch):
    make, asked = torch.UntypedStorage._new_using_filename_cpu, list[int]()

    def failing(words: str, times: int) -> None:
        asked.clear()

        def answer(size: int) -> torch.UntypedStorage:
            asked.append(size)
            if len(asked) <= times:
                raise RuntimeError(words)
            return make(size)

        monkeypatch.setattr(torch.UntypedStorage, "_new_using_filename_cpu", answer)

    late = "Shared memory manager connection has timed out"
    failing(late, 2)
    assert len(shared_memory(64, torch.device("cpu"))) == 64 and len(asked) == 3
    for words, times in ((late, 10), ("no space left on device", 1)):
        failing(words, 1000)
        with pytest.raises(NotShared, match=words):
            shared_memory(64, torch.device("cpu"))
        assert len(asked) == times
