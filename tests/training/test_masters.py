"""Exact weights that are kept as rounded ones and 16 bits more, and moments that are kept rounded."""

import numpy as np
import pytest
import torch

from asyncrl.algorithms.losses import loss_of
from asyncrl.training.adamw import MOMENTS
from asyncrl.training.masters import joined, split_bits
from asyncrl.training.model_optimizer import Update
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from harness.training import host_tensor, policy, policy_rows, prepared_by, save

UPDATE = Update(learning_rate=1e-2, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.05)


def state(trainer):
    """Everything of a checkpoint, by name."""
    held = trainer.copy_state().files()
    return {(stem, one.name): host_tensor(one).clone() for stem, tensors in held.items() for one in tensors}


def test_a_float32_comes_back_from_the_nearest_bfloat16_and_16_bits():
    bits = torch.arange(-(2**31), 2**31, 65521 // 3, dtype=torch.int64).to(torch.int32)
    ties = (torch.arange(0, 2**16, dtype=torch.int64) << 16) + 0x8000
    exact = torch.cat([bits, (ties - 2**31).to(torch.int32)]).view(torch.float32)
    exact = exact[exact.abs() < 3e38]

    near, rest = split_bits(exact.view(torch.int32))
    rounded = near.view(torch.bfloat16)

    assert torch.equal(joined(rounded, rest).view(torch.int32), exact.view(torch.int32))
    usual = exact.bfloat16()
    tie = (exact.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(rounded[~tie], usual[~tie])
    assert torch.equal((rounded[tie].float() - exact[tie]).abs(), (usual[tie].float() - exact[tie]).abs())


def test_what_is_no_number_is_not_hidden_by_rounding():
    bits = torch.tensor([0x7FFFFFFF, 0x7FFF8000, 0x7FC00000, 0x7F800001, 0x7F800000], dtype=torch.int64)
    bits = torch.cat([bits, bits - 2**31]).to(torch.int32)

    near, rest = split_bits(bits)
    rounded = near.view(torch.bfloat16)

    assert not rounded.isfinite().any()
    assert torch.equal(joined(rounded, rest).isnan(), bits.view(torch.float32).isnan())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_each_update_is_that_of_adamw_in_float32(model, dtype, moments):
    trainer = TorchTrainer(model, TorchSettings(dtype=dtype, moments=moments))
    own, kept = trainer._own, getattr(torch, moments)
    rng, steps = np.random.default_rng(1), 3
    before = state(trainer)

    for step in range(steps):
        exact = {name: one.clone().requires_grad_() for (stem, name), one in before.items() if stem == "model"}
        plain = torch.optim.AdamW(exact.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        rows = prepared_by(trainer, policy_rows(rng, 9), policy())
        _, norm = trainer._gradient(trainer._passes.cut(rows), loss_of(policy()))
        for name, one in exact.items():
            one.grad = own.parameters[name].grad.clone()
            if step:
                held = {key: before["optimizer", f"{key}.{name}"].float().clone() for key in MOMENTS}
                plain.state[one] = {"step": torch.tensor(float(step)), **held}
        assert norm > 2 * UPDATE.max_grad_norm
        torch.nn.utils.clip_grad_norm_(exact.values(), UPDATE.max_grad_norm)
        plain.step()
        own.update(UPDATE, norm)

        before = state(trainer)
        for name, one in exact.items():
            torch.testing.assert_close(before["model", name], one.detach(), rtol=1e-6, atol=1e-8)
            for key in MOMENTS:
                found, expected = before["optimizer", f"{key}.{name}"], plain.state[one][key]
                assert found.dtype == kept
                # Of bfloat16 the next number is 2^-7 away at most, where float32 is on the edge of two.
                close = 2**-7 if kept == torch.bfloat16 else 2e-6
                torch.testing.assert_close(found.float(), expected, rtol=close, atol=1e-12)
                assert (found == expected.to(kept)).float().mean() > 0.99 or kept == torch.float32


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
