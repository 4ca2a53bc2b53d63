"""A process of a run loads the user's files, and the local modules that they import, from the copies of the run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.bus.address import BusAddress
from asyncrl.config.load import load_config
from asyncrl.errors import LaunchError
from asyncrl.run.directory import RunFiles
from asyncrl.run.host_files import Parcel
from asyncrl.run.inputs import NOTHING, Accepted, changed_data, find_inputs, take_inputs
from harness.runs import WITHOUT_MODEL, command, resume, two_steps_more, up

REWARD = """
import json
from pathlib import Path
import points
from shop import prices

def reward(prompt, completion, label):
    import late
    return [points.POINTS, prices.PRICE, late.LATE, Path(__file__).name]
"""
FILES = {
    "rewards/reward.py": REWARD,
    "rewards/points.py": "POINTS = 1",
    "rewards/late.py": "import points\nLATE = points.POINTS + 1",
    "rewards/json.py": "raise SystemExit('the json of Python comes first')",
    "rewards/shop/prices.py": "from . import taxes\nPRICE = taxes.TAX",
    "rewards/shop/taxes.py": "TAX = 3",
    "rewards/other.py": "OTHER = 1",
    "filters.py": "def of_groups(rewards):\n    return True",
    "rows.jsonl": '{"prompt": "^a=", "label": "a"}\n',
}
CONFIG = """
[reward]
function = "rewards/reward.py:reward"
[task]
source = "rows.jsonl"
options = {}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "own.toml").write_text(CONFIG)
    return folder


def opened(project: Path, accepted: Accepted = NOTHING) -> tuple[Path, list[str]]:
    """A run directory with the inputs of the project; and what differs from those that it had."""
    root = project.parent / "run"
    root.mkdir(exist_ok=True)
    loaded = load_config(str(project / "own.toml"))
    return root, take_inputs(root, loaded.config, loaded.base, accepted)


CHILD = """
from pathlib import Path
from asyncrl.functions import load_function
print(load_function("rewards/reward.py:reward", base=Path({project!r}))("", "", ""))
"""
ACTOR = """
import subprocess, sys
from pathlib import Path
from asyncrl.own_code import use_copies
use_copies(Path({root!r}))
subprocess.run([sys.executable, "-c", {child!r}], check=True)
"""


def graded(root: Path, project: Path) -> str:
    """Return what the reward answers in a child of a process of the run."""
    program = ACTOR.format(root=str(root), child=CHILD.format(project=str(project)))
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def test_code_is_loaded_from_its_copies_whatever_becomes_of_the_files(project: Path):
    root, _ = opened(project)
    before = graded(root, project)
    assert before == "[1, 3, 2, 'reward.py']"

    for name in ("reward.py", "points.py", "late.py", "shop/prices.py", "shop/taxes.py"):
        (project / "rewards" / name).write_text("raise SystemExit('edited')")
    assert graded(root, project) == before
    shutil.rmtree(project / "rewards")
    assert graded(root, project) == before


def test_code_that_changes_the_folder_of_its_process_loads_its_copies(project: Path, monkeypatch: pytest.MonkeyPatch):
    reward = project / "rewards" / "reward.py"
    reward.write_text(reward.read_text().replace("    import late", "    import os; os.chdir('/'); import late"))
    root, _ = opened(project)

    monkeypatch.chdir(root.parent)
    assert graded(Path(root.name), project).startswith("[1, ")


def test_a_host_without_the_run_directory_loads_the_copies_that_it_was_sent(project: Path, tmp_path: Path):
    root, _ = opened(project)
    login, home = tmp_path / "reward.json", tmp_path / "home"
    BusAddress("nats://127.0.0.1:1").save(login)
    sent = Parcel(load_config(str(project / "own.toml")).config, RunFiles(root, project), home, "")
    for name, content in sent.files("reward", login).items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(content)
    shutil.rmtree(project / "rewards")

    assert graded(home, home / "base") == "[1, 3, 2, 'reward.py']"


def test_the_inputs_of_a_run_are_the_files_that_it_names_and_what_they_import(project: Path):
    loaded = load_config(
        str(project / "own.toml"), overrides=[f"learner.filters=[{str(project / 'filters.py:of_groups')!r}]"]
    )

    inputs = find_inputs(loaded.config, loaded.base)

    named = ["rewards/reward.py", "rewards/points.py", "rewards/shop/prices.py", "rewards/shop/taxes.py"]
    assert sorted(file.copy for file in inputs.code) == sorted([*named, "rewards/late.py", "filters.py"])
    assert [Path(file.path).name for file in inputs.data] == ["rows.jsonl"]


def test_a_resumed_run_keeps_its_code_until_it_is_refreshed(project: Path):
    root, _ = opened(project)
    (project / "rewards" / "points.py").write_text("POINTS = 10")

    _, lines = opened(project)
    assert len(lines) == 1 and "points.py differs; the run keeps its copy (--refresh-code takes" in lines[0]
    assert graded(root, project).startswith("[1, ")

    _, lines = opened(project, Accepted(code=True))
    assert len(lines) == 1 and "points.py is refreshed" in lines[0]
    assert graded(root, project).startswith("[10, ")
    assert (root / "code-1" / "rewards" / "points.py").read_text() == "POINTS = 1"
    assert opened(project) == (root, [])


def test_a_resumed_run_refuses_other_data_until_it_is_accepted(project: Path):
    root, _ = opened(project)
    digests = {str(project / "rows.jsonl"): next(iter(find_inputs_of(project)))}
    assert changed_data(digests) == []
    (project / "rows.jsonl").write_text('{"prompt": "^b=", "label": "b"}\n')
    assert changed_data(digests) == [str(project / "rows.jsonl")]

    with pytest.raises(LaunchError, match=r"rows.jsonl is not the file that .* found 32 bytes .* --accept-data"):
        opened(project)
    _, lines = opened(project, Accepted(data=True))
    assert len(lines) == 1 and "rows.jsonl differs; the run continues with it" in lines[0]
    assert opened(project) == (root, [])

    (project / "rows.jsonl").unlink()
    with pytest.raises(LaunchError, match="the file is gone"):
        opened(project, Accepted(data=True))


def find_inputs_of(project: Path) -> list[str]:
    loaded = load_config(str(project / "own.toml"))
    return [file.digest for file in find_inputs(loaded.config, loaded.base).data]


def test_a_damaged_copy_is_refused_until_it_is_refreshed(project: Path):
    root, _ = opened(project)
    (root / "code" / "rewards" / "late.py").write_text("LATE = 9")
    with pytest.raises(LaunchError, match=r"late.py is not the copy of .* --refresh-code"):
        opened(project)

    _, lines = opened(project, Accepted(code=True))
    assert len(lines) == 1 and "late.py is refreshed" in lines[0]
    assert opened(project) == (root, [])

    shutil.rmtree(root / "code")
    opened(project, Accepted(code=True))
    assert opened(project) == (root, [])


RUN = """
run = "own"
[task]
source = "rows.jsonl"
options = {}
[reward]
function = "rew.py:reward"
[rollout]
group_size = 2
max_new_tokens = 4
[buffer]
batch_groups = 4
[learner]
steps = 100000
[recorder]
plot = false
[eval]
prompts = 0
"""


@pytest.mark.slow
async def test_a_run_has_one_code_and_one_data_until_it_is_resumed_with_others(tmp_path: Path):
    reward, rows = tmp_path / "rew.py", tmp_path / "rows.jsonl"
    reward.write_text("def reward(prompt, completion, label):\n    return 0.0\n")
    rows.write_text('{"prompt": "^a=", "label": "a"}\n' * 8)
    async with up(tmp_path, *WITHOUT_MODEL, "run=own", config=RUN) as run:
        await run.reaches(lambda: len(run.steps()) > 1, "two steps")
        reward.write_text(reward.read_text().replace("0.0", "100.0"))
        await run.kill("reward-1")
        await two_steps_more(run, "two steps with another reward worker")
        await two_steps_more(run, "and two more")
        run.interrupt()
        assert await run.ended() == 0, run.story
    assert {row["reward/mean"] for row in run.rows()} == {0.0}

    rows.write_text('{"prompt": "^b=", "label": "b"}\n' * 8)
    code, output = await command(tmp_path, "up", "--resume", "own", "--refresh-code")
    assert (code, "rows.jsonl is not the file that the run began with" in output) == (1, True), output
    async with resume(tmp_path, "own", "--accept-data", "--refresh-code") as again:
        await again.reaches(lambda: run.rows()[-1]["reward/mean"] == 100.0, "a step with the other reward")
        again.interrupt()
        assert await again.ended() == 0, again.story
    assert f"code {reward} is refreshed" in again.out
    assert "current inputs count from step " in again.out

    code, output = await command(tmp_path, "audit", "own", "--deep")
    assert code == 0, output
    changed = [line for line in output.splitlines() if line.lstrip().startswith("changed")]
    assert [path in line for path, line in zip(("rew.py", "rows.jsonl"), changed, strict=True)] == [True, True]
    assert "rows.jsonl is not the file that the run began with" in output
