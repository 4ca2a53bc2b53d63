"""The layer that predicts the token after the next one, and correction biases that move, in several layouts."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.algorithms.losses import loss_of
from asyncrl.training.disk_names import DiskNames
from asyncrl.training.host_copy import Source
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from harness.megatron_ahead import CASES, FAMILIES, GRADIENTS, RATE, STEPS, TRAINED, WEIGHT
from harness.megatron_cases import EPS, objective, rows_of
from harness.mixtures import SHAPE, write_model_ahead
from harness.ranks import run_group
from harness.training import copies, save

pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # two processes with torch in six layouts

LAYER = SHAPE["num_hidden_layers"]
PREFIX = f"model.layers.{LAYER}."
AGAIN = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder with what two processes found."""
    folder = tmp_path_factory.mktemp("ahead")
    for name, options in FAMILIES.items():
        write_model_ahead(folder / name, *options)
    run_group(["-m", "tests.harness.megatron_ahead"], 2, folder)
    return folder


def opened(folder, name, **further):
    return TorchTrainer(folder / name, TorchSettings(micro_batch_tokens=64, eps=EPS, **further))


def expected_gradients(directory, rows):
    """Gradients of the layer, computed row by row with modules of transformers."""
    config = AutoConfig.from_pretrained(directory)
    config.num_hidden_layers = LAYER + 1
    if hasattr(config, "layer_types"):
        config.layer_types = None
    whole = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    trunk, tensors = whole.model, load_file(directory / "model.safetensors")
    layer, trunk.layers = trunk.layers[LAYER], trunk.layers[:LAYER]
    own = {
        name: tensors[f"{PREFIX}{name}.weight"].requires_grad_()
        for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    }

    def normed(hidden, name):
        return F.rms_norm(hidden, hidden.shape[-1:], own[name], config.rms_norm_eps)

    for row in rows:
        tokens = torch.from_numpy(row.tokens).long()[None]
        with torch.no_grad():
            hidden, embedded = trunk(tokens[:, :-2]).last_hidden_state, trunk.embed_tokens(tokens[:, 1:-1])
        joined = torch.cat((normed(embedded, "enorm"), normed(hidden, "hnorm")), -1) @ own["eh_proj"].T
        positions = torch.arange(joined.shape[1])[None]
        made = layer(joined, position_ids=positions, position_embeddings=trunk.rotary_emb(joined, positions))
        logits = normed(made, "shared_head.norm")[0] @ whole.lm_head.weight.detach().T
        logprobs = (logits / row.temperature).log_softmax(-1).gather(1, tokens[0, 2:, None])[:, 0]
        weights = torch.from_numpy(row.weights * row.mask)[2:]
        torch.autograd.backward(-WEIGHT * (weights * logprobs).sum())
    found = {f"{PREFIX}{name}.weight": one.grad for name, one in own.items()}
    for key, parameter in layer.named_parameters():
        source = Source("", PREFIX + key, parameter.grad, parameter.dtype)
        found |= {one.name: one.tensor for one in DiskNames().divided(source, tuple(parameter.shape))}
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_the_layer_has_the_gradient_of_its_loss_alone_and_the_trunk_its_own_bits(results, name):
    trainer, on_disk = opened(results, name), load_file(results / name / "model.safetensors")
    rows = trainer.with_gradient(rows_of(0), loss_of(objective(0)))
    expected = expected_gradients(results / name, rows)
    largest = max(float(one.abs().max()) for one in expected.values())
    for case in GRADIENTS:
        found = load_file(results / f"{name}-{case}.safetensors")
        of_layer = {key for key in found if key.startswith(f"gradient.{PREFIX}")}
        assert of_layer == {f"gradient.{key}" for key in expected}
        for key, one in expected.items():
            assert float((found[f"gradient.{key}"] - one).abs().max()) < 2e-6 * largest, key
        trunk = {key.removeprefix("alone.") for key in found if key.startswith("alone.")}
        assert {f"gradient.{key}" for key in trunk} == {key for key in found if key.startswith("gradient.")} - of_layer
        for key in trunk:
            assert torch.equal(found[f"gradient.{key}"], found[f"alone.{key}"]), key
        assert {f"weight.{key}" for key in on_disk} == {key for key in found if key.startswith("weight.")}
        for key, one in on_disk.items():
            assert torch.equal(found[f"weight.{key}"], one), key


@pytest.mark.parametrize("case", CASES)
def test_steps_are_the_same_in_each_layout_and_the_trunk_moves_as_without_the_layer(results, case):
    found, one = (load_file(results / f"trained-{name}.safetensors") for name in (case, "one"))

    alone = {name for name in one if name.startswith("alone.")}
    assert found.keys() == (one.keys() if case in GRADIENTS else one.keys() - alone)
    for name, tensor in found.items():
        assert torch.allclose(tensor, one[name], rtol=1e-5, atol=1e-5), name
        if name in alone:
            assert torch.equal(tensor, found[name.replace("alone.", "ahead.", 1)]), name
    begun = load_file(results / TRAINED / "model.safetensors")
    for name in (name for name in found if name.startswith(f"ahead.after.{PREFIX}")):
        assert not torch.equal(found[name], begun[name.removeprefix("ahead.after.")]), name
    assert {f"ahead.{kind}.{PREFIX}eh_proj.weight" for kind in ("model", "optimizer.exp_avg")} <= found.keys()
    assert f"ahead.figures.mtp_loss.{STEPS - 1}" in found


def test_correction_biases_move_by_the_load_of_their_experts(results):
    trainer = opened(results, TRAINED)
    begun, loads = copies(trainer), 0
    rows = trainer.with_gradient(rows_of(0), loss_of(objective(0)))
    trainer._policy.replay()
    experts = trainer._policy.mixture.experts
    for row in rows:
        with torch.no_grad():
            trainer._policy(*trainer._passes.lay([row]).inputs)
        told = torch.from_numpy(trainer._policy.taken()).view(len(row.tokens) - 1, LAYER, -1).long()
        counted = F.one_hot(told[torch.from_numpy(row.mask[1:] > 0)], experts).sum((0, 2))
        loads = loads + counted
    place = next(results.glob("alone-one/model*.safetensors"))
    after = load_file(place)
    for layer in range(1, LAYER):
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        direction = (loads[layer].float().mean() - loads[layer]).sign()
        assert direction.abs().sum() > 0
        assert torch.equal(after[name], begun[name] + RATE * direction), name


def test_the_torch_trainer_publishes_the_layer_as_it_was_and_keeps_one_that_was_trained(results, tmp_path):
    trainer, begun = opened(results, TRAINED), load_file(results / TRAINED / "model.safetensors")
    published = copies(trainer)
    assert published.keys() == begun.keys()
    assert all(torch.equal(published[name], one) for name, one in begun.items())

    trainer.step(rows_of(0), objective(0))
    published = copies(trainer)
    for name, one in begun.items():
        again = AGAIN.get(name.removeprefix(PREFIX))
        if again:
            assert torch.equal(published[name], published[again])
            assert not torch.equal(published[name], one)
        elif name.startswith(PREFIX):
            assert torch.equal(published[name], one), name

    trainer.load(results / "ahead-one")
    held, published = load_file(next(results.glob("ahead-one/model*.safetensors"))), copies(trainer)
    save(trainer, tmp_path)
    trained = [name for name in held if name.startswith(PREFIX)]
    assert len(trained) == len([name for name in begun if name.startswith(PREFIX)]) - len(AGAIN)
    again = load_file(next(tmp_path.glob("model*.safetensors")))
    for name in trained:
        assert torch.equal(published[name], held[name]), name
        assert torch.equal(again[name], held[name]), name
