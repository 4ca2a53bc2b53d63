"""A small version of each recipe: its config and its program train a made model for two steps."""

import json
import re
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.ports import free_port
from asyncrl.training.init_model import ModelShape, create_model
from harness.pages import ROOT
from harness.runs import up

RECIPES = ROOT / "recipes"
LONG = pytest.mark.nightly  # five data sets are opened
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '>' }}{% endfor %}"
SMALL = ("learner.steps=2", "learner.dtype=float32", "buffer.batch_groups=4", "rollout.slots=16", "eval.every=0")


ON_A_CPU = [
    *("engine.kind=embedded", "engine.gpus=[]", "engine.arguments=[]", "engine.max_running=16"),
    *("learner.device=cpu", "weights.transport=gloo", "rollout.workers=1", "rollout.max_new_tokens=8"),
    *("model.create.layers=2", "model.create.hidden=64", "model.create.heads=2", "model.create.kv_heads=1"),
    *("model.create.head_dim=32", "model.create.ffn=192", "model.create.context=64"),
]  # `two-gpus` with a small model


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("talker")
    shape = ModelShape(context=1024)
    create_model(directory, alphabet=string.printable, seed=1, shape=shape, template=TEMPLATE)
    return directory


def with_free_port(tmp_path: Path) -> Path:
    """Copy the recipe `judge`, whose rubric names the port of its judge."""
    folder = tmp_path / "judge"
    shutil.copytree(RECIPES / "judge", folder)
    rubric = folder / "rubric.toml"
    rubric.write_text(re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{free_port()}", rubric.read_text()))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    ["tools", "lora", "distil", "judge", "online", "coder", "two-gpus", pytest.param("reasoning-gym", marks=LONG)],
)
async def test_a_small_version_of_a_recipe_trains(recipe: str, talker: Path, tmp_path: Path):
    own = [f"run={recipe}"] + (ON_A_CPU if recipe == "two-gpus" else [f"model.path={talker}"])
    own += [f"gateway.port={free_port()}"] if recipe == "online" else ["eval.prompts=4"]
    own += ["sandbox.kind=none", "sandbox.trusted=true"] if recipe == "coder" else []
    own += [f"learner.teacher.model={talker}"] if recipe == "distil" else []
    folder = with_free_port(tmp_path) if recipe == "judge" else RECIPES / recipe
    async with up(tmp_path, *SMALL, *own, config=str(folder / "recipe.toml")) as run:
        assert await run.ended() == 0, run.story

    steps = [row for row in run.rows("step") if row["stage"] == "rl"]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(sum(row["tokens_by_lag"].values()) > 0 for row in steps)
    if recipe == "reasoning-gym":
        tasks = {key.split("/")[1] for row in steps for key in row if key.startswith("task/")}
        assert tasks <= {"chain_sum", "gcd", "letter_counting", "spell_backward", "leg_counting"}
        assert len(tasks) > 1
    if recipe == "judge":
        assert {"reward/short", "reward/whole", "reward/on_topic", "reward/author"} <= steps[0].keys()


def test_results_of_a_recipe_become_figures_and_a_curve(tmp_path: Path):
    results = tmp_path / "results"
    results.mkdir()
    for seed, variant in ((1, "recipe"), (2, "recipe"), (1, "synchronous")):
        steps = [{"step": step, "reward_mean": step / 10, "time_s": 10.0 * step + seed} for step in range(1, 11)]
        evaluations = [{"version": 0, "accuracy": 0.1, "time_s": 5.0}, {"version": 10, "accuracy": 0.8, "time_s": 99.0}]
        row = {"variant": variant, "seed": seed, "settings": [], "evaluations": evaluations, "steps": steps}
        (results / f"{variant}-{seed}.json").write_text(json.dumps(row))
    program = [sys.executable, str(RECIPES / "train.py"), "tools", "--seeds", "1", "2", "--output", str(tmp_path)]
    subprocess.run(program, check=True)  # both results exist, so nothing is trained

    figures = json.loads((tmp_path / "figures.json").read_text())["recipe"]
    assert figures["reward_first"] == [0.3, 0.3]
    assert figures["reward_last_median"] == 0.8
    assert figures["accuracy_last"] == [0.8, 0.8]
    assert figures["seconds_a_step"] == [10.0, 10.0]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
