"""A list of tensors in shared memory names constructors of tensors; anything else is refused, and nothing is called."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from asyncrl.weights.shared import View, pack_tensors, shared_memory, unpack_tensors
from asyncrl.weights.shared_names import NotShared, check_names


class _Calls:
    def __init__(self, *call: object) -> None:
        self._call = call

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self._call[0], self._call[1:]


def test_what_the_learner_packs_names_tensors_alone():
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        (packed,) = pack_tensors(shared_memory(64, torch.device("cpu")), [[View("a", dtype, (2, 4), 0)]])

        check_names(packed)


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
