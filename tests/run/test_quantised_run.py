"""Runs that begin with a quantised model and serve quantised versions, and those that are refused before."""

import json
from pathlib import Path

import pytest

from asyncrl.data.quantisation import quantised_as, read_quantisation
from asyncrl.training.publisher import Publisher
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from asyncrl.weights.files.store import FileStore
from harness.audited import assert_consistent
from harness.configs import problems
from harness.models import made_model
from harness.runs import up


def quantised_model(folder: Path, form: str) -> Path:
    """A directory with quantised weights."""
    plain = made_model(folder / "plain")
    trainer = TorchTrainer(plain, TorchSettings(quantised=quantised_as(plain, form)))
    publisher = Publisher(trainer, store=FileStore(folder / "weights"), checkpoints=folder)
    publisher.copy_weights()
    publisher.export(folder / form)
    return folder / form


@pytest.mark.real_start
@pytest.mark.slow
async def test_a_run_trains_real_weights_and_serves_them_as_its_model_was(tmp_path: Path):
    model = quantised_model(tmp_path, "fp8-blocks")
    settings = [f"model.path={model}", "weights.delta=always", "learner.steps=3", "eval.prompts=8"]

    async with up(tmp_path, *settings) as run:
        assert await run.ended() == 0, run.story

    assert_consistent(run, steps=3, warmup_steps=4)
    assert read_quantisation(Path(run.summary["exported_model"])) == read_quantisation(model)
    assert [row["version"] for row in run.rows("weights")] == [0, 1, 2, 3]
    assert all(row["choice"].startswith("difference") for row in run.rows("weights")[1:])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["weights.format=fp8-blocks", "weights.transport=ipc"],
            "versions in the form fp8-blocks go only through the store",
        ),
        (["weights.format=fp8-blocks", "engine.staged=always"], "in the form fp8-blocks only from files"),
        (
            ["weights.format=fp8-blocks", "learner.lora.rank=4", "learner.lora.publish=adapter"],
            "adapters are added to no quantised weights",
        ),
        (["weights.format=int4-groups", "model.create.ffn=190"], "has 190 columns, which are no groups of 32"),
        (["weights.format=int4-groups", "engine.kind=sglang"], "takes no second version"),
    ],
)
def test_a_form_that_cannot_be_published_is_refused(settings, words):
    assert any(words in one.message for one in problems("demo", *settings, files=True))


def test_a_quantised_model_is_checked_by_the_names_that_its_matrices_stand_for(tmp_path: Path):
    model = quantised_model(tmp_path, "int4-groups")
    given = [f"model.path={model}", "weights.transport=ipc"]
    [problem] = problems("demo", *given, files=True)
    assert "in the form int4-groups go only through the store" in problem.message

    (model / "config.json").write_text((model / "config.json").read_text().replace('"num_bits": 4', '"num_bits": 8'))

    assert json.loads((model / "config.json").read_text())
    assert "num_bits = 8), expected FP8" in problems("demo", *given, files=True)[0].message
