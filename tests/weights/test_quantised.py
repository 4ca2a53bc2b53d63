"""Quantised versions: the numbers against loops over scalars, the names on disk, and whoever reads them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.data.model_dir import ModelError, tensor_shapes
from asyncrl.data.quantisation import quantised_as, read_quantisation
from asyncrl.engine.embedded.config import read_config
from asyncrl.engine.embedded.weights import load_weights
from asyncrl.training.protocol import NonFiniteWeights
from asyncrl.training.publisher import Publisher
from asyncrl.training.tensor_files import TensorFiles
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from asyncrl.weights.delta import DeltaRecord, apply_delta
from asyncrl.weights.files.store import FileStore
from asyncrl.weights.quantised import plain_names, quantise, read_plain, stored_as
from harness.mixtures import MIXTURE, write_transformers_model
from harness.training import copies, policy, policy_rows

FORMS = ("fp8-blocks", "int4-groups")
E4M3 = [
    math.ldexp(8 + mantissa if exponent else mantissa, max(exponent, 1) - 10)
    for exponent in range(16)
    for mantissa in range(8)
][:-1]  # from 0 to 448: four bits of exponent, bias 7, three of mantissa; the last pattern is no number


def nearest(value: float) -> float:
    """The e4m3 number that is nearest; of two as near the one whose mantissa is even."""
    place = min(range(len(E4M3)), key=lambda index: (abs(E4M3[index] - abs(value)), index % 2))
    return math.copysign(E4M3[place], value)


def test_fp8_blocks_are_those_of_a_loop_over_scalars():
    weight = torch.randn(130, 257, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 0, 257)
    weight[128:, 128:256] = 0.0

    found, scales = quantise("fp8-blocks", weight)

    assert (scales.shape, scales.dtype, found.dtype) == ((2, 3), torch.float32, torch.float8_e4m3fn)
    for row in range(0, 130, 43):
        for column in range(257):
            block = weight[row // 128 * 128 :][:128, column // 128 * 128 :][:, :128]
            scale = np.float32(block.abs().max()) / np.float32(448)
            if scale:
                assert float(scales[row // 128, column // 128]) == scale
                assert float(found[row, column]) == nearest(float(np.float32(weight[row, column]) / scale))
    stored = {"x.weight": found, "x.weight_scale_inv": scales}
    back = read_plain("x.weight", stored, stored.__getitem__)
    spread = scales.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :257]
    assert bool(((back - weight).abs() <= torch.maximum(weight.abs() / 16, spread / 1024) * (1 + 1e-6)).all())
    assert not back[128:, 128:256].any()


def test_ue8m0_scales_are_the_next_powers_of_two_and_survive_a_second_quantisation():
    weight = torch.randn(130, 257, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 0, 257)
    weight[0, 0] = 448.0 / 1024  # whose scale is a power already

    (found, scales), (_, exact) = quantise("fp8-blocks-ue8m0", weight), quantise("fp8-blocks", weight)

    assert float(scales[0, 0]) == 2.0**-10
    assert torch.equal(scales, 2.0 ** exact.log2().ceil())
    stored = {"x.weight": found, "x.weight_scale_inv": scales}
    back = read_plain("x.weight", stored, stored.__getitem__)
    again, others = quantise("fp8-blocks-ue8m0", back)
    assert torch.equal(
        read_plain(
            "x.weight",
            {**stored, "x.weight": again, "x.weight_scale_inv": others},
            {"x.weight": again, "x.weight_scale_inv": others}.__getitem__,
        ),
        back,
    )


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({"fmt": "e4m3", "scale_fmt": "ue8m0"}, "fp8-blocks-ue8m0"),  # DeepSeek-V3.1 and V3.2
        ({"fmt": "float8_e4m3fn"}, "fp8-blocks"),  # MiniMax-M2
    ],
)
def test_a_published_form_is_read_and_written_with_its_configuration(tmp_path, changes, form):
    write_transformers_model(tmp_path / "plain", "qwen3", {})
    made = quantised_as(tmp_path / "plain", "fp8-blocks")
    (tmp_path / "model").mkdir()
    for file in (tmp_path / "plain").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    for name in made.names:
        for one, value in zip(
            stored_as(form, name, tuple(tensors[name].shape)), quantise(form, tensors[name]), strict=True
        ):
            tensors[one.name] = value
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({**config, "quantization_config": {**made.config, **changes}})
    )

    own = read_quantisation(tmp_path / "model")
    trainer = TorchTrainer(tmp_path / "model", TorchSettings(quantised=quantised_as(tmp_path / "model", "model")))

    assert (own.form, own.names) == (form, made.names)
    for name, tensor in copies(trainer).items():
        assert torch.equal(tensor.float(), tensors[name].float()), name


@pytest.mark.parametrize("form", FORMS)
def test_a_part_of_a_matrix_is_read_out_of_the_blocks_that_have_it(tmp_path, form):
    weight = torch.randn(300, 352, generator=torch.Generator().manual_seed(0))
    stored = dict(
        zip((one.name for one in stored_as(form, "x.weight", (300, 352))), quantise(form, weight), strict=True)
    )
    save_file(stored, tmp_path / "model.safetensors")

    with TensorFiles(tmp_path, "model") as files:
        whole = files["x.weight"]
        for dim, start, stop in ((0, 0, 150), (0, 150, 300), (0, 290, 999), (1, 0, 176), (1, 176, 352), (1, 8, 9)):
            part = files.narrow("x.weight", dim, start, stop)
            assert torch.equal(part, whole[start:stop] if dim == 0 else whole[:, start:stop])


def test_int4_groups_are_those_of_compressed_tensors():
    weight = torch.arange(64).mul(37).remainder(64).sub(31).div(8).view(1, 64)

    packed, scales, shape = quantise("int4-groups", weight)

    # By pack_to_int32, calculate_qparams and quantize of compressed-tensors 0.20.0.
    assert packed.tolist() == [
        [417710993, -1299223478, 1547302868, -154885746, -1619178712, 974644658, -727609492, 2119903734]
    ]
    assert scales.tolist() == [[0.53515625, 0.515625]]
    assert (scales.dtype, shape.tolist()) == (torch.bfloat16, [1, 64])
    stored = dict(zip(("x.weight_packed", "x.weight_scale"), (packed, scales), strict=True))
    back = read_plain("x.weight", stored, stored.__getitem__)
    for place in range(64):
        steps = (packed[0, place // 8].item() >> 4 * (place % 8) & 15) - 8
        assert float(back[0, place]) == steps * scales[0, place // 32].item()
    # The largest value of a group is 7.5 steps: one above the middle loses half of one, and the scale is rounded.
    assert float((back - weight).abs().max()) <= 0.5 * float(scales.max()) * (1 + 2**-7)


@pytest.mark.parametrize("form", FORMS)
def test_what_was_quantised_comes_back_as_it_was(form):
    weight = torch.randn(130, 256, generator=torch.Generator().manual_seed(0))
    names = [one.name for one in stored_as(form, "x.weight", (130, 256))]

    made = dict(zip(names, quantise(form, weight), strict=True))
    again = quantise(form, read_plain("x.weight", made, made.__getitem__))

    assert all(torch.equal(one.float(), other.float()) for one, other in zip(made.values(), again, strict=True))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    write_transformers_model(folder, "qwen3_moe", {**MIXTURE, "moe_intermediate_size": 32, "intermediate_size": 64})
    return folder


def opened(directory: Path, form: str) -> TorchTrainer:
    return TorchTrainer(directory, TorchSettings(quantised=quantised_as(directory, form), eps=1e-4))


def publisher_of(trainer: TorchTrainer, folder: Path) -> Publisher:
    found = Publisher(trainer, store=FileStore(folder / "weights"), checkpoints=folder, run="r")
    found.copy_weights()
    return found


@pytest.mark.parametrize("form", FORMS)
def test_versions_in_a_form_are_models_of_it_which_trainer_and_engine_read_alike(mixture, tmp_path, form):
    trainer = opened(mixture, form)

    place = Path(publisher_of(trainer, tmp_path).publish(lineage=0, version=0).location)

    chosen, plain = trainer.form.names, load_file(mixture / "model.safetensors")
    stored = {one.name: (one.dtype, one.shape) for name in chosen for one in stored_as(form, name, plain[name].shape)}
    stored |= {name: (one.dtype, one.shape) for name, one in plain.items() if name not in chosen}
    on_disk = load_file(place / "model.safetensors")
    assert {name: (one.dtype, tuple(one.shape)) for name, one in on_disk.items()} == stored
    assert all(".experts." in name or (form == "fp8-blocks" and "_proj" in name) for name in chosen)
    assert len(chosen) == (4 * (4 * 3 + (4 if form == "fp8-blocks" else 0)))
    config = json.loads((place / "config.json").read_text())
    rest = config["quantization_config"]["modules_to_not_convert" if form == "fp8-blocks" else "ignore"]
    assert {"lm_head", "model.layers.0.mlp.gate"} <= {*rest}
    assert read_quantisation(place) == trainer.form  # as a checkpoint of somebody else has it
    assert tensor_shapes(place) == {name: tuple(one.shape) for name, one in plain.items()}
    again = TorchTrainer(place)
    whole = {name: read_plain(name, on_disk, on_disk.__getitem__) for name in plain_names(on_disk)}
    for name, one in copies(again).items():
        assert torch.equal(one, whole[name]), name
        assert float((one - plain[name]).norm() / plain[name].norm()) < (0.03 if form == "fp8-blocks" else 0.12)
    assert again.config is not None and b"quantization_config" not in again.config  # versions of this one are plain
    save_file(whole, tmp_path / "model.safetensors")
    served, expected = (load_weights(one, read_config(mixture), torch.float32) for one in (place, tmp_path))
    tokens = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    assert all(
        torch.equal(one.experts(tokens)[0], other.experts(tokens)[0])
        and torch.equal(one.qkv(tokens), other.qkv(tokens))
        for one, other in zip(served.layers, expected.layers, strict=True)
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_difference_of_quantised_versions_is_one_of_their_bytes(mixture, tmp_path, form):
    trainer = opened(mixture, form)
    publisher = publisher_of(trainer, tmp_path)
    base = publisher.publish(lineage=0, version=0)
    trainer.step(policy_rows(np.random.default_rng(0), 6), policy(1e-5))
    publisher.copy_weights()

    found = publisher.publish(lineage=0, version=1, base=base.key)

    assert found.base == base.key and found.bytes < base.bytes
    (target := tmp_path / "made").mkdir()
    apply_delta(Path(found.location), Path(base.location), target, expected=DeltaRecord("r", base.key, found.key, []))
    assert (target / "config.json").read_bytes() == (Path(base.location) / "config.json").read_bytes()
    assert found.digest == publisher.digest() != base.digest


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_are_not_finite_are_not_hidden_by_a_form(mixture, tmp_path, form):
    trainer = opened(mixture, form)
    next(one for name, one in trainer._own.parameters.items() if "down_proj" in name).data[..., 0] = math.inf
    publisher = publisher_of(trainer, tmp_path)

    with pytest.raises(NonFiniteWeights, match=r"down_proj\.weight_scale"):
        publisher.publish(lineage=0, version=0)


def spoilt(directory: Path, target: Path, change) -> Path:
    """A model whose tensors of one matrix are others."""
    target.mkdir()
    for path in directory.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    tensors = load_file(target / "model.safetensors")
    change(tensors, "model.layers.1.mlp.experts.2.up_proj")
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_without_its_scales_or_with_others_is_refused(mixture, tmp_path, form):
    values, scales = (".weight", ".weight_scale_inv") if form == FORMS[0] else (".weight_packed", ".weight_scale")
    place = Path(publisher_of(opened(mixture, form), tmp_path).publish(lineage=0, version=0).location)

    changes = {
        f"found .*up_proj{values}, and no .*up_proj{scales}": lambda tensors, module: tensors.pop(module + scales),
        f"found .*up_proj{scales}, and no .*up_proj{values}": lambda tensors, module: tensors.pop(module + values),
        rf"up_proj{scales} has shape \(3, 3\), that of .* values is": (
            lambda tensors, module: tensors.update({module + scales: torch.ones(3, 3)})
        ),
        rf"up_proj{values} has shape \(8,\), which is no matrix": (
            lambda tensors, module: tensors.update({module + values: tensors[module + values].flatten()[:8]})
        ),
    }
    for number, (words, change) in enumerate(changes.items()):
        torn = spoilt(place, tmp_path / str(number), change)
        with pytest.raises(ModelError, match=rf"{words}.*fetch it again"):
            read_quantisation(torn)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "awq"}, "quant_method = 'awq'"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_block_size = None, activation_scheme"),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]},
            "weight_block_size = [64, 64]",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "group_size": 128}}},
            },
            "num_bits = 8, group_size = 128",
        ),
    ],
)
def test_another_form_is_refused_by_name(tmp_path, config, words):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))

    with pytest.raises(ModelError, match=r"expected FP8 in blocks of 128 x 128, or INT4") as error:
        read_quantisation(tmp_path)
    assert words in str(error.value)
