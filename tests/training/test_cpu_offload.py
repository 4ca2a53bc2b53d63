"""A trainer whose tensors leave the device between its steps trains the same bits, and the memory is free meanwhile."""

import numpy as np
import pytest
import torch

from asyncrl.training.cpu_offload import Offloader
from asyncrl.training.host_copy import Source, _copy
from asyncrl.training.host_memory import fill_at_once
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from harness.ranks import run_ranks
from harness.roles import TO_REFERENCE, assert_same_bits
from harness.training import policy_rows, save
from topics.batches import CriticStep, Objective

BYTES = 4  # of a float32


def resizable(trainer):
    """Put weights where a device would have them: those of a CPU are mapped from their file, and would stay there."""
    held = {id(one): one for one in [*trainer._own.tensors(), *trainer._critic.tensors(), *trainer._frozen]}
    for tensor in held.values():
        tensor.data = tensor.data.clone()
    return trainer


def whole(models, *, offloads=False):
    beside = {"critic": models / "teacher", "teacher": models / "teacher"}
    return resizable(TorchTrainer(models / "policy", TorchSettings(**beside, offloads=offloads)))


def learning_apart(trainer):
    """A list that gets what policy and critic have on the device while the other one learns."""
    found, policy, critic = [], trainer._gradient, trainer._critic.gradient

    def of_policy(*given):
        found.append(stored(trainer._critic.tensors()))
        return policy(*given)

    def of_critic(*given):
        found.append(stored(trainer._own.tensors()))
        return critic(*given)

    trainer._gradient, trainer._critic.gradient = of_policy, of_critic
    return found


def objective(step, penalties):
    critic = CriticStep(learning_rate=1e-2, value_clip=0.0)
    return Objective(loss="ppo", learning_rate=1e-2, critic=critic, penalties=penalties, reference=step // 2 * 2)


def stored(tensors):
    return sum(one.untyped_storage().nbytes() for one in {one.data_ptr(): one for one in tensors}.values())


def test_training_with_rests_between_the_steps_has_the_same_bits(models, tmp_path):
    rng, trainers = np.random.default_rng(2), [whole(models), whole(models, offloads=True)]
    plain, apart = map(learning_apart, trainers)
    for step in range(4):
        rows = policy_rows(rng, 12)
        found = [trainer.step(rows, objective(step, [TO_REFERENCE])) for trainer in trainers]
        restored_s = found[1].pop("restore_s", 0.0)
        assert found[0] == found[1] and (restored_s > 0.0) == (step not in (0, 2)), "a save brought all back before"
        trainers[1].rest()
        if step == 1:
            for name, trainer in zip("01", trainers, strict=True):
                (tmp_path / name).mkdir()
                save(trainer, tmp_path / name)  # which brings everything back

    rested = trainers[1]
    rested.rest()
    rested.load(tmp_path / "1")
    trainers[0].load(tmp_path / "0")
    rested.step(rows, objective(4, [TO_REFERENCE]))
    trainers[0].step(rows, objective(4, [TO_REFERENCE]))
    assert_same_bits(*trainers)
    assert len(plain) == len(apart) == 10 and min(plain) > 0
    assert not any(apart[:8]), "but what a checkpoint's file is mapped for"


def test_a_resting_trainer_holds_nothing_on_its_device_and_says_how_much_it_moved(models):
    trainer = whole(models)
    trainer.step(policy_rows(np.random.default_rng(2), 12), objective(0, []))
    own, critic = trainer._own.tensors(), trainer._critic.tensors()
    # Of each trained parameter the weight and two moments; the teacher is as large as the critic, but for its head.
    expected = stored([*own, *critic, *trainer._frozen])
    weights = sum(one.numel() for one in trainer._own.parameters.values())
    assert stored(own) == 3 * BYTES * weights

    moved = trainer.rest()

    assert moved.bytes == moved.copied == trainer._offloader.held_bytes == expected
    assert {one.untyped_storage().nbytes() for one in [*own, *critic, *trainer._frozen]} == {0}
    assert trainer.rest().bytes == moved.bytes, "what has left does not leave twice"
    trainer.copy_weights()
    assert trainer._offloader.held_bytes == 0
    assert stored([*own, *critic, *trainer._frozen]) == expected
    assert all(torch.isfinite(one).all() for one in own)


def test_published_weights_leave_without_another_copy_until_a_step_may_have_moved_them(models):
    plain, rested = whole(models), whole(models)
    weights = sum(one.numel() for one in rested._own.parameters.values()) * BYTES
    for step in range(3):
        rows = policy_rows(np.random.default_rng(step), 12)
        for trainer in (plain, rested):
            trainer.step(rows, objective(step, []))
        copied = rested.rest()
        assert copied.copied == copied.bytes > weights, "of the weights that were published is no copy"
        rested.copy_weights()
        left = rested.rest()
        assert (left.bytes, left.copied) == (copied.bytes, copied.bytes - weights)
        rested.copy_state()  # which brings all back, to other places
        left = rested.rest()
        assert (left.bytes, left.copied) == (copied.bytes, copied.bytes - weights)
        assert_same_bits(plain, rested)


def test_weights_of_a_checkpoint_are_not_taken_for_those_that_were_published(models, tmp_path):
    trainer, other = whole(models), whole(models)
    rows = policy_rows(np.random.default_rng(0), 12)
    trainer.step(rows, objective(0, []))
    save(trainer, tmp_path)
    other.copy_weights()
    other.load(tmp_path)
    other.rest()
    assert_same_bits(trainer, other)


def test_weights_whose_second_copy_failed_come_back_as_they_were(models, monkeypatch):
    """The second one, of other tensors, has written over a part of the first."""
    plain, trainer = whole(models), whole(models)
    rows = policy_rows(np.random.default_rng(0), 12)
    for one in (plain, trainer):
        one.step(rows, objective(0, []))
    trainer.copy_weights()
    sources, copied = trainer._weights(), []

    def failing(source: Source, place: object) -> None:
        if len(copied) == len(sources) // 2:
            raise OSError("the disk is gone")
        copied.append(_copy(source, place))

    with monkeypatch.context() as patched, pytest.raises(OSError, match="gone"):
        patched.setattr("asyncrl.training.host_copy._copy", failing)
        patched.setattr(trainer, "_weights", lambda: sources[::-1])
        trainer.copy_weights(whole=True)

    trainer.rest()
    assert_same_bits(plain, trainer)


def test_host_memory_is_filled_with_zeros_by_several_threads(monkeypatch):
    monkeypatch.setattr("asyncrl.training.host_memory._AT_ONCE", 7)
    memory = torch.arange(50, dtype=torch.uint8)

    fill_at_once(memory)

    assert not memory.any()


def test_what_no_free_piece_of_the_device_is_large_enough_for_comes_back_piece_by_piece(monkeypatch):
    resting, tensor = Offloader(torch.device("cpu")), torch.arange(8.0)
    resting.leave([tensor])

    def full(*_: object, **_options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no piece of this size")

    with monkeypatch.context() as patched:
        patched.setattr(resting, "_device", torch.device("cuda"))
        patched.setattr(torch, "empty", full)
        resting.reserve()
    resting.come_back()

    assert torch.equal(tensor, torch.arange(8.0))


def test_tensors_for_which_the_host_has_no_memory_stay_as_they_are(monkeypatch: pytest.MonkeyPatch):
    def full(size: int, device: torch.device) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("asyncrl.training.cpu_offload.host_memory", full)
    resting, tensor, zeros = Offloader(torch.device("cpu")), torch.arange(4.0), torch.zeros(4)

    with pytest.raises(RuntimeError, match="out of memory"):
        resting.leave([tensor], [zeros])

    resting.come_back()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0] and zeros.tolist() == [0.0] * 4


RANKS = """
import sys
import numpy as np
from pathlib import Path
from asyncrl.training.ranks import join_ranks
from asyncrl.training.torch.trainer import TorchTrainer
from harness.training import copies, policy, policy_rows
rank, ranks, model, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
join_ranks(folder, rank, ranks, "cpu")
found = []
for rests in (False, True):
    trainer, rng, moved = TorchTrainer(model), np.random.default_rng(5), 0
    for _ in range(3):
        trainer.step(policy_rows(rng, 12)[rank::ranks], policy())
        moved = trainer.rest().bytes if rests else 0
    parameters = sum(one.to_local().numel() for one in trainer._own.parameters.values())
    assert moved >= 12 * parameters * rests, (moved, parameters)
    found.append({name: one.numpy().tobytes() for name, one in copies(trainer).items()})
assert found[0] == found[1]
print("equal", len(found[0]))
"""


@pytest.mark.slow
def test_sharded_ranks_rest_alike(models, tmp_path):
    assert run_ranks(RANKS, 2, models / "policy", tmp_path / "rendezvous").startswith("equal ")
