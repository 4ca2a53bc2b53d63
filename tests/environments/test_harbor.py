"""Folders of Harbor tasks become rows, and harnesses work on them in a sandbox."""

import shutil
from functools import partial
from pathlib import Path

import pytest

from asyncrl.config.harness_settings import CommandSettings, HarnessSettings, MiniSettings
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.environments.kinds import make
from asyncrl.environments.protocol import DataError
from asyncrl.harnesses.kinds import harness_kind
from asyncrl.harnesses.rollout import harness_rollout
from asyncrl.sandboxes.kinds import open_sandbox
from asyncrl.sandboxes.sandbox import SandboxError
from harness.configs import problems
from harness.lives import Life, printable_tokenizer
from harness.sandboxes import settings_of
from topics.prompts import PromptRow

DIGITS = Path(__file__).parents[2] / "asyncrl" / "examples" / "digits"
SOLVES = CommandSettings(command=["bash", "-c", "grep -q answer /data/notes.txt && echo 2 > /app/answer"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    return printable_tokenizer(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DIGITS / "write-2", tmp_path / "write-2"))


def row_of(task: Path, **options) -> PromptRow:
    return make("harbor", str(task), options, 1).row(0)


async def work(tokenizer: TaskTokenizer, row: PromptRow, settings: HarnessSettings = SOLVES, *replies: str) -> Life:
    life, left = Life(tokenizer, most=64), [*replies]
    life.host.written = lambda ids: [*tokenizer.encode(left.pop(0)).tolist(), tokenizer.eos_ids[0]]
    opened = partial(open_sandbox, settings_of("bubblewrap"))
    await life.run(partial(harness_rollout(harness_kind(settings).make(settings, Path()), settings, opened), row))
    return life


def test_a_row_has_all_files_of_its_task_and_each_epoch_each_task():
    tasks = make("harbor", str(DIGITS), {}, 1)
    one = make("harbor", f"{DIGITS}@[1:2]", {}, 1).row(0)

    assert tasks.rows_per_epoch == 4
    assert sorted(tasks.row(place).metadata["task"] for place in range(4, 8)) == [f"write-{one}" for one in range(4)]
    assert one.prompt == [{"role": "user", "content": "write 1\n"}]
    assert one.metadata["difficulty"] == "easy"
    assert one.metadata["links"]["/app"] == "."
    assert list(one.metadata["files"]) == [".harbor/root/data/notes.txt"]


async def test_mini_works_on_a_task_and_its_tests_give_the_reward(tokenizer):
    row = row_of(DIGITS / "write-2")
    file = MiniSettings(file="answer", turns=1)
    shell = "```sh\ncp /data/notes.txt . && echo 2 > /app/answer\n```"

    right, wrong = await work(tokenizer, row, file, "2"), await work(tokenizer, row, file, "3")
    copied = await work(tokenizer, row, MiniSettings(), shell, "done")

    assert [life.context.outcome_given().reward for life in (right, wrong, copied)] == [1.0, 0.0, 1.0]
    assert b"+2" in copied.context.outcome_given().artefacts["diff"]


async def test_a_program_can_write_neither_its_reward_nor_its_tests(tokenizer, task: Path):
    (task / "tests" / "test.sh").write_text("true\n")
    (task / "tests" / "data").write_bytes(b"\xff\x00")
    writes = ["bash", "-c", "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"]
    tests = ["bash", "-c", "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh"]

    written = await work(tokenizer, row_of(task), CommandSettings(command=writes))
    replaced = await work(tokenizer, row_of(task), CommandSettings(command=tests))

    assert [life.context.outcome_given().reward for life in (written, replaced)] == [0.0, 0.0]
    assert replaced.context.outcome_given().metrics["tests_changed"] == 1.0


@pytest.mark.parametrize(
    ("script", "reward"),
    [("echo 0.25 > reward.txt", 0.25), ("echo '{\"reward\":2}' > reward.json", 2.0), ("echo no > reward.txt", 0.0)],
)
async def test_the_tests_write_any_number_as_the_reward(script: str, reward: float, tokenizer, task: Path):
    (task / "tests" / "test.sh").write_text(f"cd /logs/verifier; {script}\n")

    life = await work(tokenizer, row_of(task))

    assert life.context.outcome_given().reward == reward


async def test_tests_that_never_end_and_files_that_are_too_large_are_named_in_the_report(tokenizer, task: Path):
    (task / "tests" / "test.sh").write_text("sleep 600\n")
    (task / "task.toml").write_text("[verifier]\ntimeout_sec = 0.5\n")
    large = CommandSettings(command=["sh", "-c", "head -c 3000000 /dev/zero > large; echo 2 > answer"])

    life = await work(tokenizer, row_of(task), large)

    outcome = life.context.outcome_given()
    report = outcome.artefacts["tests"].decode()
    assert outcome.reward == 0.0
    assert "test.sh: exit code -9, stopped by wall_s" in report
    assert "not given to the tests: large; a file has at most 1,048,576 bytes" in report
    assert outcome.metrics["files_left_out"] == 1.0


async def test_a_setup_that_fails_or_hangs_is_a_fault_of_the_environment(tokenizer):
    fails = row_of(DIGITS / "write-2", setup=["sh", "-c", "echo no disk; exit 3"])
    hangs = row_of(DIGITS / "write-2", setup=["sleep", "600"], setup_limit_s=0.5)

    with pytest.raises(SandboxError, match=r"the setup of the row, sh .* ended with exit code 3: no disk"):
        await work(tokenizer, fails)
    with pytest.raises(SandboxError, match=r"the setup of the row, sleep 600, was stopped by wall_s"):
        await work(tokenizer, hangs)


def test_a_task_that_cannot_serve_is_named_with_what_it_lacks(task: Path):
    def fault(**options) -> str:
        with pytest.raises(DataError) as caught:
            row_of(task, **options)
        return str(caught.value)

    dockerfile = task / "environment" / "Dockerfile"
    dockerfile.write_text("FROM x\nWORKDIR /app\nRUN apt-get install gcc\n")
    assert "write-2 needs the commands of its Dockerfile: RUN apt-get install gcc. Its image is not used" in fault()
    assert row_of(task, host=True).metadata["files"] == {}
    dockerfile.write_text("FROM x\nCOPY absent.txt .\n")
    assert "Dockerfile copies absent.txt, which is not in" in fault()
    dockerfile.write_text("FROM x\nCOPY Dockerfile /etc/file\n")
    assert "copies a file to /etc/file, which is of the system" in fault()
    dockerfile.unlink()
    (task / "task.toml").write_text('[environment]\ndocker_image = "no/such:image"\n')
    assert "needs the image no/such:image. Its image is not used; set the option host = true" in fault()
    (task / "task.toml").write_text("")
    (task / "tests" / "data").write_bytes(bytes(5 << 20))
    assert "bytes, expected at most 4,194,304" in fault()
    (task / "tests" / "data").unlink()
    (task / "tests" / "test.sh").unlink()
    assert "has no tests/test.sh" in fault()
    assert "its options are host, images, setup" in fault(colour="red")


def test_a_sandbox_without_absolute_paths_is_refused_before_the_run():
    settings = (f"task.source=harbor:{DIGITS}", "eval.prompts=0", "warmup.steps=0")

    found = problems("coder", "sandbox.kind=none", "sandbox.trusted=true", *settings, files=True)

    words = " ".join(one.message for one in found)
    assert "has tests at absolute paths, which sandboxes of this kind do not have" in words
