"""Sandboxes of a Harbor task are containers of the image that the task names."""

import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from asyncrl.config.harness_settings import CommandSettings, HarnessSettings, MiniSettings
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.environments.kinds import make
from asyncrl.harnesses.kinds import harness_kind
from asyncrl.harnesses.rollout import harness_rollout
from asyncrl.sandboxes.kinds import open_sandbox
from asyncrl.sandboxes.sandbox import SandboxError
from harness.configs import problems
from harness.lives import Life, printable_tokenizer
from harness.sandboxes import import_image, settings_of
from topics.prompts import PromptRow

DIGITS = Path(__file__).parents[2] / "asyncrl" / "examples" / "digits"
AGENT = """
import json, os, urllib.request
body = {"model": "any", "messages": [{"role": "user", "content": "How many?"}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(address, json.dumps(body).encode(), headers)
reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
assert open("/app/tool").read() == "of the image", open("/app/tool").read()
open("/app/answer", "w").write(reply)
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    return printable_tokenizer(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Path]:
    """A task whose image has files in the working folder."""
    settings_of("podman")
    image = import_image("podman", "task", dict.fromkeys(("app/tool", "app/deep/large"), b"of the image"))
    folder = Path(shutil.copytree(DIGITS / "write-2", tmp_path / "write-2"))
    (folder / "task.toml").write_text(f'[environment]\ndocker_image = "{image}"\n')
    (folder / "environment" / "Dockerfile").write_text("FROM x\nWORKDIR /app\nCOPY absent /etc/file\nRUN make tool\n")
    yield folder
    made_of = podman("image", "inspect", "--format", "{{.Id}}", image)
    for linked in podman("images", "--quiet", "asyncrl-links").split():
        if podman("image", "inspect", "--format", "{{.Parent}}", linked) == made_of:
            podman("rmi", "--force", linked)


def podman(*words: str) -> str:
    return subprocess.run(["podman", *words], check=False, capture_output=True, text=True).stdout.strip()


async def work(task: Path, tokenizer: TaskTokenizer, settings: HarnessSettings, *replies: str) -> Life:
    life, left = Life(tokenizer, most=64), [*replies]
    life.host.written = lambda ids: [*tokenizer.encode(left.pop(0)).tolist(), tokenizer.eos_ids[0]]
    row: PromptRow = make("harbor", str(task), {"images": True}, 1).row(0)
    opened = partial(open_sandbox, settings_of("podman"))
    await life.run(partial(harness_rollout(harness_kind(settings).make(settings, Path()), settings, opened), row))
    return life


async def test_mini_and_a_program_work_on_the_files_of_the_image_and_reach_the_policy(task, tokenizer):
    program = CommandSettings(command=["python3", "agent.py"], files={"agent.py": AGENT})
    shell = "```sh\ncat tool && echo more >> /app/tool && echo 2 > answer\n```"

    ran = await work(task, tokenizer, program, "2")
    mini = await work(task, tokenizer, MiniSettings(), shell, "Done.")

    for life in (ran, mini):
        outcome = life.context.outcome_given()
        assert (outcome.reward, outcome.artefacts.get("failure")) == (1.0, None)
    diff = mini.context.outcome_given().artefacts["diff"].decode()
    assert "b/tool" in diff and "b/answer" in diff and "large" not in diff


async def test_an_image_that_is_absent_is_named_with_the_command_that_gets_it(task, tokenizer):
    (task / "task.toml").write_text('[environment]\ndocker_image = "no/such:image"\n')

    with pytest.raises(SandboxError, match='"no/such:image" is not on this machine; run: podman pull no/such:image'):
        await work(task, tokenizer, MiniSettings())


def test_a_kind_of_sandboxes_without_images_is_refused_before_the_run():
    settings = ("task.options={images=true}", "eval.prompts=0", "warmup.steps=0")

    found = problems("coder", f"task.source=harbor:{DIGITS}", *settings, files=True)

    words = " ".join(one.message for one in found)
    assert "has images, which sandboxes of this kind do not take; set podman or docker" in words
