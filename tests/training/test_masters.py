"""Exact weights that are kept as rounded ones and 16 bits more, and moments that are kept rounded."""

import numpy as np
import pytest
import torch

from asyncrl.algorithms.losses import loss_of
from asyncrl.training.masters import _split, joined
from asyncrl.training.optimized import MOMENTS, Update
from asyncrl.training.torch_trainer import TorchSettings, TorchTrainer
from harness.training import host_tensor, policy, policy_rows, prepared_by, save

UPDATE = Update(learning_rate=1e-2, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0)


def state(trainer):
    """Everything of a checkpoint, by name."""
    held = trainer.copy_state().files()
    return {(stem, one.name): host_tensor(one).clone() for stem, tensors in held.items() for one in tensors}


def test_a_float32_comes_back_from_the_nearest_bfloat16_and_16_bits():
    bits = torch.arange(-(2**31), 2**31, 65521 // 3, dtype=torch.int64).to(torch.int32)
    ties = (torch.arange(0, 2**16, dtype=torch.int64) << 16) + 0x8000
    exact = torch.cat([bits, (ties - 2**31).to(torch.int32)]).view(torch.float32)
    exact = exact[exact.abs() < 3e38]
    rounded, rest = torch.empty_like(exact, dtype=torch.bfloat16), torch.empty_like(exact, dtype=torch.int16)

    _split(exact.view(torch.int32), rounded.view(torch.int16), rest)

    assert torch.equal(joined(rounded, rest).view(torch.int32), exact.view(torch.int32))
    usual = exact.bfloat16()
    tie = (exact.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(rounded[~tie], usual[~tie])
    assert torch.equal((rounded[tie].float() - exact[tie]).abs(), (usual[tie].float() - exact[tie]).abs())


def test_what_is_no_number_is_not_hidden_by_rounding():
    bits = torch.tensor([0x7FFFFFFF, 0x7FFF8000, 0x7FC00000, 0x7F800001, 0x7F800000], dtype=torch.int64)
    bits = torch.cat([bits, bits - 2**31]).to(torch.int32)
    rounded, rest = torch.empty(len(bits), dtype=torch.bfloat16), torch.empty(len(bits), dtype=torch.int16)

    _split(bits, rounded.view(torch.int16), rest)

    assert not rounded.isfinite().any()
    assert torch.equal(joined(rounded, rest).isnan(), bits.view(torch.float32).isnan())


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_masters_and_moments_move_as_those_of_adamw_in_float32(model, moments):
    trainer = TorchTrainer(model, TorchSettings(dtype="bfloat16", moments=moments))
    own, kept = trainer._own, getattr(torch, moments)
    exact = {name: one.clone().requires_grad_() for (stem, name), one in state(trainer).items() if stem == "model"}
    plain = torch.optim.AdamW(exact.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8, fused=True)
    rng, bits = np.random.default_rng(1), torch.int32

    for _ in range(3):
        rows = prepared_by(trainer, policy_rows(rng, 9), policy())
        _, norm = trainer._gradient(trainer._passes.cut(rows), loss_of(policy()))
        for name, one in exact.items():
            one.grad = own.parameters[name].grad.clone()
        torch.nn.utils.clip_grad_norm_(exact.values(), 1.0)
        plain.step()
        for moment in plain.state.values():
            moment.update({key: moment[key].to(kept).float() for key in MOMENTS})
        own.update(UPDATE, norm)

    found = state(trainer)
    for name, one in exact.items():
        assert torch.equal(found["model", name].view(bits), one.detach().view(bits)), name
        for key in MOMENTS:
            assert found["optimizer", f"{key}.{name}"].dtype == kept
            assert torch.equal(found["optimizer", f"{key}.{name}"].float(), plain.state[one][key]), name


def test_between_updates_a_weight_has_4_bytes_and_its_moments_have_4(model):
    trainer = TorchTrainer(model, TorchSettings(dtype="bfloat16", moments="bfloat16"))
    trainer.step(policy_rows(np.random.default_rng(1), 9), policy())

    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in trainer._own.tensors()}

    assert sum(held.values()) == 8 * sum(one.numel() for one in trainer._own.parameters.values())


def test_training_with_rounded_moments_resumes_bit_equal(model, tmp_path):
    rng = np.random.default_rng(3)
    first, second = (TorchTrainer(model, TorchSettings(dtype="bfloat16", moments="bfloat16")) for _ in range(2))
    first.step(policy_rows(rng, 12), policy())
    save(first, tmp_path)
    second.load(tmp_path)
    rows = policy_rows(rng, 12)
    for trainer in (first, second):
        trainer.step(rows, policy())

    found, expected = state(second), state(first)

    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())
