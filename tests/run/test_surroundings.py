"""A run works in whatever folder it is started, and whatever files lie there."""

import importlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.server import EmbeddedServer
from asyncrl.cli.main import run as run_command
from asyncrl.config.load import load_config
from asyncrl.process import python
from asyncrl.run.preflight import check_surroundings
from harness.configs import SOUND, the_problem
from harness.launches import prepared
from harness.models import made_model
from harness.runs import command, up

ODD = "é 测试 'q' \"d\" [b] #$%\\x41"  # letters of other scripts, a space, and what shells and configurations quote
SHADOWS = ("topics", "actors", "asyncrl", "random", "types", "logging", "msgspec", "torch")
USERS = """
import random
from beside import share
from topics.prompts import PromptRow

def reward(completion, label):
    return share(completion, label) + 1e-3 * random.random()

async def rollout(row: PromptRow, context):
    await context.generate(context.tokenizer.encode_prompt(row, max_tokens=None))
"""
BESIDE = "def share(said, wanted):\n    return sum(a == b for a, b in zip(said, wanted)) / len(wanted)\n"


def crowded(folder: Path) -> Path:
    """A folder with files that have the names of modules, and end whatever process imports them."""
    folder.mkdir()
    for name in SHADOWS:
        (folder / f"{name}.py").write_text("import os\nos._exit(9)\n")
    (folder / "users.py").write_text(USERS)
    (folder / "beside.py").write_text(BESIDE)
    return folder


@pytest.mark.slow
async def test_a_whole_run_in_an_odd_folder_beside_files_with_the_names_of_modules(tmp_path: Path):
    folder = crowded(tmp_path / ODD)
    made_model(folder / "modèle")
    settings = ["model.path=modèle", "warmup.steps=1", "learner.steps=2", "eval.prompts=4", "recorder.plot=true"]
    functions = ["reward.function=users.py:reward", "task.rollout=users.py:rollout"]
    async with up(folder, *settings, *functions) as run:
        assert await run.ended() == 0, run.story

    assert run.steps() == [1, 2]
    assert run.summary["failed_trajectories_by_reason"] == {}
    assert len(run.rows("eval")) == 2
    assert (run.root / "reward.png").exists()
    code, output = await command(folder, "audit", "short")
    assert code == 0, output


async def test_a_server_takes_a_store_in_any_folder(tmp_path: Path):
    for name in (ODD, "a\ttab and a\nline", os.fsdecode(b"latin \xe9")):
        server = EmbeddedServer(tmp_path / name, run="mine")
        bus = await Bus.connect(await server.start(), "mine")
        await bus.close()
        await server.stop()

        assert (tmp_path / name / "nats" / "jetstream").is_dir()


def test_a_home_is_found_in_every_path_of_a_config(written, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "key").write_text("secret")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n')

    config = load_config(
        written(SOUND + "task.source = '~/rows.jsonl'\nengine.api_key_file = '~/key'\n"), further=check_surroundings
    ).config

    assert (config.task.source, config.engine.api_key_file) == (f"{tmp_path}/rows.jsonl", f"{tmp_path}/key")


def test_a_folder_whose_name_no_message_can_carry_is_refused(written, tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode(b"latin \xe9")
    folder.mkdir()
    monkeypatch.chdir(folder)

    assert "these paths must be UTF-8" in the_problem(written(SOUND), files=True).message


def test_a_terminal_of_few_letters_gets_the_others_escaped(tmp_path):
    (tmp_path / ODD).mkdir()
    done = subprocess.run(
        python("-m", "asyncrl.cli.main", "check", "测试.toml"),
        cwd=tmp_path / ODD,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert done.stderr.startswith("\\u6d4b\\u8bd5.toml: no such file")


@pytest.mark.parametrize("name", ["status", "audit", "logs"])
def test_a_run_of_another_user_is_refused_in_one_line(name, monkeypatch, capsys):
    importlib.import_module(f"asyncrl.cli.{name}")  # another user may not be able to
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "runs", "demo")
        root.mkdir(parents=True)
        Path(folder).chmod(0o755)
        (root / "config.json").write_text("{}")
        (root / "lock").touch(0o600)
        monkeypatch.chdir(folder)
        with as_nobody(root):
            code = run_command([name])

    (line,) = capsys.readouterr().err.splitlines()
    assert code == 1
    assert "Permission denied; the files of a run belong to its owner" in line


@contextmanager
def as_nobody(root: Path) -> Iterator[None]:
    """As a user who may not read a run: for root another user, for others one who lost the right."""
    if os.geteuid():
        (root / "lock").chmod(0)
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


async def test_a_supervisor_that_cannot_start_ends_the_run_with_the_last_lines_of_its_log(tmp_path, monkeypatch):
    broken = (
        "import os, sys\nif 'supervisor-1' in sys.orig_argv:\n    os.write(2, b'no such luck\\n')\n    os._exit(5)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(broken)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launch = prepared(tmp_path, model={"path": "unused"}, supervision={"deaths": 2})
    bus = await launch.start()
    try:
        assert await launch.ended() == 1
    finally:
        await bus.close()
        await launch.stop()

    assert launch.failure == "the supervisor died 2 times in a row, at last with exit code 5: no such luck"
