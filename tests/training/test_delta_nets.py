"""Gated delta nets over packed documents: by kernels, and by transformers' functions of torch."""

import sys
from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from asyncrl.data.model_dir import ModelError
from asyncrl.training.delta_nets import Kernels, check_kernels, compute_in_torch, find_kernels, has_kernels
from asyncrl.training.document_check import arrangement_of
from asyncrl.training.document_model import DocumentModel
from asyncrl.training.packing import documents_of
from asyncrl.training.policy import AutoModelForCausalLM
from harness.families import write_family

LENGTHS = (13, 5, 22)


def rule(query, key, value, *, g, beta, use_qk_l2norm_in_kernel, cu_seqlens):
    """The gated delta rule by its definition, token by token: arXiv 2412.06464, equation 10."""
    assert use_qk_l2norm_in_kernel
    query, key = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6) for one in (query, key))
    begins, outputs = set(cu_seqlens.tolist()), []
    for place in range(query.shape[1]):
        if place in begins:
            state = value.new_zeros(*key.shape[2:], value.shape[-1])
        one, wanted = key[0, place], value[0, place]
        state = state * g[0, place].exp()[:, None, None]
        found = (state * one[..., None]).sum(1)
        state = state + one[..., None] * (beta[0, place, :, None] * (wanted - found))[:, None]
        outputs.append((state * query[0, place][..., None]).sum(1) * query.shape[-1] ** -0.5)
    return torch.stack(outputs)[None].to(value.dtype), None


def convolution(mixed, kernel, bias, *, activation, cu_seqlens):
    """Convolve each document alone."""
    assert activation == "silu"
    rows = [
        functional.conv1d(
            functional.pad(mixed[:, start:end].mT, (kernel.shape[1] - 1, 0)), kernel[:, None], bias, groups=len(kernel)
        )
        for start, end in pairwise(cu_seqlens.tolist())
    ]
    return functional.silu(torch.cat(rows, 2).mT), None


EXACT = Kernels(rule, convolution, "1")


def read(tmp_path, name):
    write_family(tmp_path / name, name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
    compute_in_torch(model)
    return model


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next"])
def test_packed_documents_have_the_hidden_states_and_gradients_of_separate_rows(tmp_path, name):
    model = read(tmp_path, name)
    tokens, documents = torch.randint(3, 64, (1, sum(LENGTHS))), documents_of(LENGTHS, torch.device("cpu"))
    results = []
    for kernels in (None, EXACT):
        layers = DocumentModel(model, arrangement_of(model.config))
        if kernels is not None:
            layers.use_kernels(kernels)
        hidden = layers.hidden(tokens, documents)
        model.zero_grad()
        torch.autograd.backward((hidden * torch.linspace(-1, 1, hidden.shape[-1])).sum())
        results.append([hidden.detach(), *(one.grad for one in model.model.parameters())])
        layers.release()

    for expected, found in zip(*results, strict=True):
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_kernels_are_traced_by_the_compiler_of_layers(tmp_path):
    model = read(tmp_path, "qwen3.5")
    tokens, documents = torch.randint(3, 64, (1, sum(LENGTHS))), documents_of(LENGTHS, torch.device("cpu"))
    layers = DocumentModel(model, arrangement_of(model.config))
    layers.use_kernels(
        EXACT._replace(rule=torch.compiler.disable(rule), convolution=torch.compiler.disable(convolution))
    )
    expected = layers.hidden(tokens, documents)
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager")

    assert torch.allclose(layers.hidden(tokens, documents), expected, atol=1e-5)


def leaking(query, key, value, *, cu_seqlens, **options):
    return rule(query, key, value, cu_seqlens=cu_seqlens[[0, -1]], **options)


def failing(*_arguments, **_options):
    raise RuntimeError("0 active drivers ([]). There should only be one.")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(leaking, "its output differs from that of torch by"), (failing, "RuntimeError: 0 active drivers")],
    ids=["a state that leaks", "no driver"],
)
def test_kernels_that_are_wrong_here_are_refused(tmp_path, wrong, words):
    delta_net = next(filter(has_kernels, read(tmp_path, "qwen3.5").modules()))

    check_kernels(delta_net, EXACT)
    with pytest.raises(ModelError, match=rf"flash-linear-attention .* is installed, and fails here \({words}"):
        check_kernels(delta_net, EXACT._replace(rule=wrong))


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder of packages, without flash-linear-attention."""
    for name in [one for one in sys.modules if one.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [one for one in sys.modules if one.partition(".")[0] == "fla"]:
        del sys.modules[name]


def write_package(folder, content):
    """Write a flash-linear-attention of version 0.1.0."""
    facts = folder / "fla_core-0.1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: fla-core\nVersion: 0.1.0\n")
    for name in ("", "ops", "ops/gated_delta_rule", "modules"):
        (folder / "fla" / name).mkdir()
        (folder / "fla" / name / "__init__.py").touch()
    (folder / "fla" / "ops" / "gated_delta_rule" / "__init__.py").write_text(content)


def test_a_version_without_a_kernel_is_one_clear_error(packages):
    write_package(packages, "chunk_gated_delta_rule = print")

    with pytest.raises(ModelError, match=r"flash-linear-attention 0.1.0 is installed.*no causal_conv1d.*uninstall it"):
        find_kernels()


def test_a_version_that_cannot_be_imported_is_one_clear_error(packages):
    write_package(packages, "import no_triton_here")

    with pytest.raises(ModelError, match=r"fails here \(ModuleNotFoundError: No module named 'no_triton_here'\)"):
        find_kernels()
