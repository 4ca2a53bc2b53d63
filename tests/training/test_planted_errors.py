"""Errors of layouts that nothing reports (wrong gradients, right log-probs): each one shows in the norm of a step."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from harness.mixtures import SMALL, write_transformers_model
from harness.planted_errors import ERRORS, OBJECTIVE, RECORDED, rows_of
from harness.ranks import run_group
from harness.training import save

pytestmark = pytest.mark.slow  # two processes with torch


@pytest.fixture(scope="module")
def norms(request, tmp_path_factory):
    """By error: norms of megatron's first step as it is and with the error, and that of the torch trainer.

    By layout what is between two passes, of which the second goes by the experts of the first.
    """
    folder, expected = tmp_path_factory.mktemp("planted"), {}
    write_transformers_model(folder / "qwen2", *SMALL["qwen2"])
    for name in {name for name, _, _ in ERRORS.values()}:
        write_transformers_model(folder / name, *SMALL[name])
        trainer = TorchTrainer(folder / name, TorchSettings(micro_batch_tokens=64, replays=name == "qwen3-moe"))
        expected[name] = trainer.step(rows_of(name), OBJECTIVE)["grad_norm"]
        (folder / f"state-{name}").mkdir()
        save(trainer, folder / f"state-{name}")
    down = "layers.1.mlp.down_proj.weight"
    write_spoilt(folder / "state-qwen3", folder / "state-torn", down, lambda tensor: None)
    write_spoilt(folder / "state-qwen3", folder / "state-wider", down, lambda tensor: tensor[:8].clone())
    selected = [item for item in request.session.items if item.path == request.path]
    further = ["campaign"] if any(item.get_closest_marker("nightly") for item in selected) else []
    said = run_group(["-m", "tests.harness.planted_errors"], 2, folder, *further)
    found = json.loads(said.splitlines()[-1])
    if further:
        found |= {error: (*found[error], expected[name]) for error, (name, _, _) in ERRORS.items()}
    return found | {"expected": expected}


def write_spoilt(checkpoint, directory, spoilt, change):
    """A checkpoint with a tensor that is missing or of another shape, as where a file of several is of another one."""
    shutil.copytree(checkpoint, directory)
    (file,) = directory.glob("model*.safetensors")
    tensors = load_file(file)
    (name,) = [name for name in tensors if name.endswith(spoilt)]
    found = change(tensors.pop(name))
    save_file(tensors if found is None else tensors | {name: found}, file)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.nightly
def test_a_planted_error_shows_in_the_norm_of_the_gradient(norms, error):
    right, planted, expected = norms[error]

    assert right == pytest.approx(expected, rel=1e-5)
    assert planted != pytest.approx(expected, rel=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe", "deepseek-v3"])
def test_products_of_another_type_are_those_of_all_linear_layers_but_routers_and_routed_experts(norms, name):
    found, others = norms["products"][name]

    assert found == pytest.approx(norms["expected"][name], rel=1e-5)
    assert all("router" in path or ".experts." in path for path in others)


OPENED = """
from pathlib import Path
from asyncrl.config.load import load_config
from asyncrl.data.model_dir import ModelError
from asyncrl.config.trainers import trainer_kind
try:
    config = load_config("demo", overrides=["learner.trainer=megatron"]).config
    trainer_kind("megatron").open(config, Path("nowhere"), Path())
except ModelError as error:
    print(error)
"""


@pytest.mark.nightly
def test_the_library_is_the_same_where_transformer_engine_is_installed(tmp_path):
    (tmp_path / "transformer_engine.py").write_text("print('loaded')\n")
    there = {**os.environ, "PYTHONPATH": str(tmp_path)}

    found, refused = (
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", before + OPENED],
            env=there,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for before in ("", "import transformer_engine\n")
    )

    assert "loaded" not in found
    assert "nowhere" in found
    assert refused.startswith("loaded\n")
    assert "a function of the user has loaded Transformer Engine before it" in refused


@pytest.mark.nightly
@pytest.mark.parametrize("layout", RECORDED)
def test_tokens_go_where_they_went_in_the_pass_before_the_update(norms, layout):
    assert norms[layout] < 1e-5


@pytest.mark.nightly
def test_a_document_longer_than_the_micro_batches_of_all_ranks_that_share_it_is_divided_all_the_same(norms):
    assert max(len(row.tokens) for row in rows_of("qwen3")) > 2 * 4
    assert norms["long"] == pytest.approx(norms["expected"]["qwen3"], rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        ("others", "_proj.bias; it is torn, or of another model: use another"),
        ("torn", "layers.1.mlp.down_proj.weight; it is torn, or of another model: use another"),
        ("wider", "mlp.down_proj.weight has shape (8, "),
    ],
)
def test_a_checkpoint_that_is_torn_or_of_another_model_is_refused_by_every_rank(norms, checkpoint, words):
    assert words in norms[checkpoint]
