"""What the megatron trainer does on GPUs alone, against the same on the CPU in float32."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from asyncrl.training.attention import document_attention
from asyncrl.training.context_parallel.ring_attention import chunk_attention, chunks_on
from asyncrl.training.megatron.experts import Experts
from asyncrl.training.megatron.mcore_patches import around, join
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.megatron.settings import MegatronSettings
from asyncrl.training.megatron.trainer import MegatronTrainer
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from harness.context_cases import documents_of, whole_attention
from harness.megatron_cases import objective
from harness.mixtures import SMALL, routed_rows, write_transformers_model
from harness.training import policy_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")


@pytest.mark.parametrize("lengths", [[256], [100, 28, 128]])
@pytest.mark.parametrize(("heads", "own", "channels"), [(8, 2, (128, 128)), (4, 4, (192, 128))])
def test_attention_in_16_bits_is_that_of_float32(lengths, heads, own, channels):
    torch.manual_seed(0)
    size = sum(lengths)
    shapes = [(1, heads, size, channels[0]), (1, own, size, channels[0]), (1, own, size, channels[1])]
    rounded = [torch.randn(shape).bfloat16() for shape in shapes]
    weight = torch.randn(1, size, heads, channels[1])

    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        given = [one.to(device, dtype).requires_grad_() for one in rounded]
        made = document_attention(
            None, *given, None, documents=documents_of(lengths, len(lengths) == 1, device), scaling=0.1
        )[0]
        (made.float() * weight.to(device)).sum().backward()
        found.append([made, *(one.grad for one in given)])

    for exact, near in zip(*found, strict=True):
        torch.testing.assert_close(near.float().cpu(), exact.float(), rtol=0.05, atol=0.05 * float(exact.abs().max()))


@pytest.mark.parametrize("documents", [1, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_in_two_parts_is_that_of_whole_documents(documents, compiled):
    """One rank has both chunks of each document, of which the second one sees the first."""
    device = torch.device("cuda", 0)
    if not chunks_on(device):
        pytest.skip("takes a GPU whose kernel for dense tensors is the quicker one")
    with around(device):
        join(Layout())
    torch.manual_seed(0)
    lengths = [512] * documents
    rounded = [torch.randn(sum(lengths), heads, 128).bfloat16() for heads in (8, 2, 2)]
    weight = torch.randn(sum(lengths), 8, 128)
    exact = [one.float().requires_grad_() for one in rounded]
    expected = whole_attention(exact, lengths)
    (expected * weight).sum().backward()

    given = [one.to(device).requires_grad_() for one in rounded]
    attend = torch.compile(chunk_attention, fullgraph=True) if compiled else chunk_attention
    found = attend(*given, documents, scale=None)
    (found.float() * weight.to(device)).sum().backward()

    pairs = [(found, expected), *((one.grad, other.grad) for one, other in zip(given, exact, strict=True))]
    for near, right in pairs:
        torch.testing.assert_close(near.float().cpu(), right, rtol=0.05, atol=0.03 * float(right.abs().max()))


@pytest.mark.parametrize("counts", [[40, 0, 24, 0], [0, 0, 0, 5], [0, 0, 0, 0]])
def test_grouped_products_are_those_of_each_expert_also_where_some_have_no_rows(counts):
    torch.manual_seed(0)
    experts = Experts(len(counts), SimpleNamespace(hidden_size=64, moe_ffn_hidden_size=32)).cuda().bfloat16()
    for one in experts.parameters():
        torch.nn.init.normal_(one, std=0.2)
    hidden = torch.randn(sum(counts), 64, device="cuda").bfloat16().requires_grad_()
    shares = torch.rand(sum(counts), device="cuda")

    experts(hidden, torch.tensor(counts, device="cuda"), shares).float().square().sum().backward()
    found = [hidden.grad, *(one.grad for one in experts.parameters())]

    exact = [one.detach().float().requires_grad_() for one in (hidden, *experts.parameters())]
    rows = torch.split(exact[0], counts)
    total = exact[0].sum() * 0.0
    for number, own in enumerate(rows):
        gate, up = (own @ exact[1][number].T).chunk(2, -1)
        opened = F.silu(gate) * up * torch.split(shares, counts)[number][:, None]
        total = total + (opened @ exact[2][number].T).square().sum()
    total.backward()
    for near, expected in zip(found, exact, strict=True):
        if near is not None:
            largest = float(expected.grad.abs().max()) if expected.grad.numel() else 0.0
            torch.testing.assert_close(near.float(), expected.grad, rtol=0.05, atol=0.03 * largest)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_steps_in_bfloat16_are_those_of_the_torch_trainer(name, recompute, tmp_path):
    folder = tmp_path / name
    write_transformers_model(folder, *SMALL[name])
    how = {"device": "cuda", "dtype": "bfloat16", "micro_batch_tokens": 64, "eps": 1e-3, "replays": name == "qwen3-moe"}
    own = MegatronTrainer(folder, MegatronSettings(compiled=True, recompute=recompute, **how))
    other = TorchTrainer(folder, TorchSettings(**how))

    for step in range(3):
        rows = policy_rows(np.random.default_rng(step), 24)
        rows = routed_rows(rows, step) if name == "qwen3-moe" else rows
        found, expected = own.step(rows, objective(step)), other.step(rows, objective(step))
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
        assert found["loss"] == pytest.approx(expected["loss"], abs=0.02)
        assert own.rest().bytes > 0, "weights and optimiser leave the GPU, and come back with the next step"

    tensors = {one.name: one for files in own.copy_weights().files().values() for one in files}
    assert tensors.keys() == {one.name for files in other.copy_weights().files().values() for one in files}
