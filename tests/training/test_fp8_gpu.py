"""Products and steps in FP8, which take a GPU and Transformer Engine, against the same in other types."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from asyncrl.data.model_dir import ModelError
from asyncrl.training.megatron.linear_precision import Multiply, multiply_of
from asyncrl.training.megatron.settings import MegatronSettings
from asyncrl.training.megatron.trainer import MegatronTrainer
from asyncrl.weights.quantised import quantise
from harness.mixtures import write_transformers_model
from harness.training import policy_rows, save, sft

CARD = torch.device("cuda", 0)
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
SHAPES = {
    "qwen3": ("qwen3", WIDE),
    "qwen3-moe": (
        "qwen3_moe",
        {**WIDE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True},
    ),
}


def _missing():
    if not torch.cuda.is_available():
        return "takes a GPU"
    try:
        multiply_of("fp8", CARD)
    except ModelError as error:
        return str(error)
    return ""


MISSING = _missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture
def multiply() -> Multiply:
    return multiply_of("fp8", CARD)


def near_but_not_equal(found, exact):
    """Two numbers of 3 bits behind the point differ by a hundredth or two of what they add up to."""
    error = float((found.float() - exact).norm() / exact.norm())
    assert 0.002 < error < 0.06


@pytest.mark.parametrize("rows", [(256,), (3, 50), (1, 1)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_product_and_its_gradients_are_near_those_of_float32(multiply, rows, compiled):
    torch.manual_seed(0)
    given = torch.randn(*rows, 256, device=CARD).bfloat16().requires_grad_()
    weight = (torch.randn(384, 256, device=CARD) / 16).bfloat16().requires_grad_()
    bias = torch.randn(384, device=CARD).bfloat16()
    towards = torch.randn(*rows, 384, device=CARD)
    called = torch.compile(multiply, fullgraph=True) if compiled else multiply

    made = called(given, weight, bias)
    (made.float() * towards).sum().backward()

    exact = [one.detach().float().requires_grad_() for one in (given, weight)]
    right = F.linear(*exact, bias.float())
    (right * towards).sum().backward()
    assert made.dtype == given.grad.dtype == weight.grad.dtype == torch.bfloat16
    near_but_not_equal(made, right.detach())
    near_but_not_equal(given.grad, exact[0].grad)
    near_but_not_equal(weight.grad, exact[1].grad)


def test_a_matrix_that_has_no_whole_blocks_is_multiplied_as_it_is(multiply):
    given, weight = torch.randn(5, 256, device=CARD).bfloat16(), torch.randn(192, 256, device=CARD).bfloat16()

    assert torch.equal(multiply(given, weight), F.linear(given, weight))


def test_the_weights_are_those_that_an_engine_reads_in_fp8():
    from asyncrl.training.megatron import fp8  # takes Transformer Engine

    torch.manual_seed(0)
    weight = torch.randn(256, 384, device=CARD).bfloat16()

    numbers, scales = quantise("fp8-blocks", weight)
    own = fp8._weight(weight)

    assert torch.equal(own._rowwise_data.view(torch.float8_e4m3fn).float(), numbers.float())
    torch.testing.assert_close(own._rowwise_scale_inv[:, : scales.shape[1]], scales, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", SHAPES)
def test_steps_learn_as_those_in_bfloat16_and_a_checkpoint_goes_on(name, tmp_path):
    folder, rows = tmp_path / name, policy_rows(np.random.default_rng(0), 24)
    write_transformers_model(folder, *SHAPES[name])
    how = {"device": "cuda", "micro_batch_tokens": 64}
    own = MegatronTrainer(folder, MegatronSettings(dtype="fp8", compiled=True, **how))
    other = MegatronTrainer(folder, MegatronSettings(dtype="bfloat16", **how))

    found, expected = ([one.step(rows, sft(1e-3)) for _ in range(8)] for one in (own, other))
    assert found[0]["loss"] == pytest.approx(expected[0]["loss"], rel=0.01)
    assert found[0]["loss"] != expected[0]["loss"], "else nothing was multiplied in FP8"
    assert found[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=0.1)
    assert found[-1]["loss"] < 0.8 * found[0]["loss"]
    assert found[-1]["loss"] == pytest.approx(expected[-1]["loss"], abs=0.02 * found[0]["loss"])

    (tmp_path / "checkpoint").mkdir()
    save(own, tmp_path / "checkpoint")
    again = MegatronTrainer(folder, MegatronSettings(dtype="fp8", compiled=True, **how))
    again.load(tmp_path / "checkpoint")
    one, two = (trainer.step(rows, sft(1e-3)) for trainer in (own, again))
    assert one["loss"] == two["loss"]
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-3)
