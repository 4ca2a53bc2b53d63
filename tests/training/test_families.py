"""Families of transformers that no list of asyncrl names: their packed rows, gradients and published weights."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.losses import loss_of
from asyncrl.training.torch.trainer import TorchTrainer
from asyncrl.training.transformers_model import check_transformers_model
from asyncrl.weights.folders import DiskFolder
from asyncrl.weights.model_folder import write_model
from harness.families import FAMILIES, write_family, write_with_images
from harness.training import policy, policy_rows, sft


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write each model once."""
    root, made = tmp_path_factory.mktemp("families"), {}

    def directory(name):
        if name not in made:
            write_family(root / name, name)
            made[name] = root / name
        return made[name]

    return directory


def separate_gradients(directory, rows):
    """Gradients of the mean negative log-prob, row by row through transformers' own forward pass."""
    network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    network.train()
    for row in rows:
        tokens = torch.from_numpy(row.tokens).long()
        logits = network(input_ids=tokens[None], use_cache=False).logits[0, :-1] / row.temperature
        logprobs = logits.log_softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]]
        weights = torch.from_numpy(row.weights * row.mask)[1:]
        torch.autograd.backward(-(weights * logprobs).sum())
    return {name: one.grad for name, one in network.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_on_packed_rows_is_that_of_separate_documents(written, name):
    check_transformers_model(written(name))
    rows = policy_rows(np.random.default_rng(2), 9)
    expected, trainer = separate_gradients(written(name), rows), TorchTrainer(written(name))

    trainer._gradient(trainer._passes.cut(rows), loss_of(sft()))

    largest = max(float(one.abs().max()) for one in expected.values())
    found = dict(trainer._policy.model.named_parameters())
    assert found.keys() >= expected.keys()
    for key, parameter in found.items():
        wanted = expected.get(key, torch.zeros_like(parameter))  # an indexer chooses tokens, and has no gradient
        assert torch.allclose(parameter.grad, wanted, rtol=1e-3, atol=1e-5 * largest), key


@pytest.mark.parametrize("name", FAMILIES)
def test_published_weights_have_the_names_of_the_checkpoint_and_its_logits(written, tmp_path, name):
    source, trainer = written(name), TorchTrainer(written(name))
    assert trainer.step(policy_rows(np.random.default_rng(3), 6), policy())["grad_norm"] > 0

    (tmp_path / "out").mkdir()
    write_model(DiskFolder(tmp_path / "out"), trainer.copy_weights().files(), trainer.source)

    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {key: one.shape for key, one in after.items()} == {key: one.shape for key, one in before.items()}
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    tokens = torch.arange(3, 27)[None]
    own = trainer._policy.model
    own.set_attn_implementation("eager")
    trainer._policy.documents.release()
    with torch.no_grad():
        expected, found = (one.eval()(input_ids=tokens, use_cache=False).logits for one in (own, network))
    assert torch.equal(expected, found)


def test_the_language_model_of_a_model_with_images_is_trained_and_the_rest_published_unchanged(tmp_path):
    further = write_with_images(tmp_path / "model")
    check_transformers_model(tmp_path / "model")
    trainer = TorchTrainer(tmp_path / "model")
    trainer.step(policy_rows(np.random.default_rng(3), 6), policy())

    (tmp_path / "out").mkdir()
    write_model(DiskFolder(tmp_path / "out"), trainer.copy_weights().files(), trainer.source)

    before, after = (load_file(tmp_path / one / "model.safetensors") for one in ("model", "out"))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], one) for key, one in further.items())
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == before.keys() - further.keys()
