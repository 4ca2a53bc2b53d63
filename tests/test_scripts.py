"""The scripts with a virtual environment that is only half there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of what scripts/env.sh reads, with an environment without pip in which all is said to be installed."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/env.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / ".venv")], check=True)
    sums = subprocess.check_output("cat pyproject.toml constraints.txt | cksum", shell=True, cwd=tmp_path, text=True)
    (tmp_path / ".venv" / "asyncrl-installed").write_text(f" {sums}")
    return tmp_path


def sourced(clone: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-euo", "pipefail", "-c", 'source scripts/env.sh ""']
    variables = os.environ | environment
    return subprocess.run(command, cwd=clone, env=variables, capture_output=True, text=True, check=False)


def test_an_environment_without_pip_gets_one(clone: Path):
    done = sourced(clone)

    assert done.returncode == 0, done.stderr
    subprocess.run([clone / ".venv/bin/python", "-c", "import pip"], check=True)


def test_an_environment_that_cannot_have_pip_is_named_with_the_remedy(clone: Path, tmp_path: Path):
    (tmp_path / "ensurepip.py").write_text("raise SystemExit(1)\n")

    done = sourced(clone, PYTHONPATH=str(tmp_path))

    assert done.returncode == 1
    assert f"{clone}/.venv has no pip, and its Python cannot make it: install its venv package" in done.stderr
