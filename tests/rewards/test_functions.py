from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from asyncrl import functions
from asyncrl.config.load import ConfigError, load_config
from asyncrl.errors import FunctionError
from asyncrl.functions import load_function
from asyncrl.run.user_actors import ActorsError, load_actors


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        del sys.modules[name]


def refused(spec: str, base: Path) -> str:
    with pytest.raises(FunctionError) as error:
        load_function(spec, base=base)
    return str(error.value)


def test_a_function_is_found_in_a_file(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rewards.py").write_text("def double(x):\n    return 2 * x\n")

    assert load_function("mine/rewards.py:double", base=tmp_path)(21) == 42
    assert load_function(f"{tmp_path}/mine/rewards.py:double", base=Path("/"))(1) == 2


@pytest.mark.parametrize("order", [("kinds.py", "user.py"), ("user.py", "kinds.py")])
def test_a_file_that_another_imports_is_one_module_with_one_set_of_classes(tmp_path, order):
    (tmp_path / "kinds.py").write_text("class Kind:\n    pass\n\ndef kind():\n    return Kind\n")
    (tmp_path / "user.py").write_text("from kinds import Kind\n\ndef kind():\n    return Kind\n")

    one, other = [load_function(f"{name}:kind", base=tmp_path)() for name in order]

    assert one is other


def test_a_file_that_is_named_as_a_module_of_python_stays_beside_it(tmp_path):
    (tmp_path / "colorsys.py").write_text("def mine():\n    return 1\n")
    (tmp_path / "user.py").write_text("import colorsys\n\ndef mine():\n    return hasattr(colorsys, 'mine')\n")

    assert load_function("colorsys.py:mine", base=tmp_path)() == 1
    assert load_function("user.py:mine", base=tmp_path)() is False


def test_a_function_is_found_in_an_installed_module(tmp_path):
    assert load_function("math:sqrt", base=tmp_path)(9) == 3


def test_a_file_is_run_once_for_all_its_functions(tmp_path):
    (tmp_path / "once.py").write_text("seen = []\ndef put(x):\n    seen.append(x)\ndef get():\n    return seen\n")

    load_function("once.py:put", base=tmp_path)("x")

    assert load_function("once.py:get", base=tmp_path)() == ["x"]


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rewards.py").write_text(f"def who():\n    return {name!r}\n")

    assert [load_function(f"{name}/rewards.py:who", base=tmp_path)() for name in "ab"] == ["a", "b"]


def test_a_module_beside_the_file_imports_and_no_other_folder_joins_the_path(tmp_path):
    (tmp_path / "beside_it.py").write_text("value = 7\n")
    (tmp_path / "rewards.py").write_text("from beside_it import value\ndef get():\n    return value\n")
    before = sys.path.copy()

    assert load_function("rewards.py:get", base=tmp_path)() == 7
    load_function("rewards.py:get", base=tmp_path)
    assert sys.path == [*before, str(tmp_path)]


@pytest.mark.parametrize("code", ["from topics import WORDS", "import topics\nWORDS = topics.WORDS"])
def test_a_module_beside_the_file_hides_no_installed_one_and_the_error_names_it(tmp_path, code):
    import topics  # as every actor has

    (tmp_path / "topics.py").write_text("WORDS = ['a']\n")
    (tmp_path / "random.py").write_text("1 / 0\n")
    (tmp_path / "rewards.py").write_text("import random\nimport topics.wire\ndef get():\n    return random.random()\n")
    (tmp_path / "words.py").write_text(f"{code}\ndef get(): ...\n")

    assert 0 <= load_function("rewards.py:get", base=tmp_path)() < 1
    assert refused("words.py:get", tmp_path).endswith(
        f"`import topics` finds {topics.__file__}, not topics.py in the folder of the file; rename it"
    )


def test_a_missing_file_error_lists_the_files_there_are(tmp_path):
    (tmp_path / "rewards.py").touch()

    assert refused("reward.py:get", tmp_path) == (
        f"reward.py:get: no file {tmp_path}/reward.py; Python files in its folder: rewards.py"
    )


def test_a_missing_function_error_lists_the_functions_there_are(tmp_path):
    (tmp_path / "rewards.py").write_text("import math\nlimit = 3\ndef grade(): ...\ndef judge(): ...\n")

    assert refused("rewards.py:solve", tmp_path) == (
        "rewards.py:solve: rewards.py has no function 'solve'; it has grade, judge"
    )
    assert refused("rewards.py:grades", tmp_path).endswith("it has grade")
    assert "'limit' is no function but int" in refused("rewards.py:limit", tmp_path)


def test_a_missing_module_is_named(tmp_path):
    assert "no module 'no_such_package'" in refused("no_such_package.rewards:get", tmp_path)
    assert "no module 'json.rewards'" in refused("json.rewards:get", tmp_path)


def test_a_file_that_does_not_import_shows_its_own_fault(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")

    text = refused("broken.py:get", tmp_path)

    assert "broken.py does not import" in text
    assert text.endswith("No module named 'no_such_package'")
    assert "SyntaxError" in refused("syntax.py:f", tmp_path)
    assert "SyntaxError" in refused("syntax.py:f", tmp_path)  # nothing half-loaded stays behind


def test_a_module_that_does_not_import_shows_its_own_fault(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_module.py").write_text("import no_such_package\n")

    assert "broken_module does not import" in refused("broken_module:get", tmp_path)


STUBBORN = "while True:\n    try:\n        threading.Event().wait()\n    except Exception:\n        pass"


@pytest.mark.parametrize("body", ["threading.Event().wait()", STUBBORN])
def test_what_hangs_at_its_import_at_its_import_is_reported_with_the_line_that_it_stood_at(tmp_path, monkeypatch, body):
    monkeypatch.setattr(functions, "IMPORT_LIMIT_S", 0.1)
    (tmp_path / "hangs.py").write_text(f"import threading\n\n{body}\n")
    config = tmp_path / "my.toml"
    config.write_text('[learner]\nloss = "hangs.py:loss"\n')

    with pytest.raises(ConfigError) as error:
        load_config(str(config))
    assert "after 0.1 s its import had reached line" in refused("hangs.py:reward", tmp_path)
    with pytest.raises(ActorsError, match=r"after 0\.1 s its import had reached line"):
        load_actors(["hangs.py"], tmp_path)

    (problem,) = error.value.problems
    assert (problem.line, problem.key) == (2, "learner.loss")
    assert "hangs.py does not import" in problem.message
    assert re.search(rf"after 0\.1 s its import had reached line [345] of {tmp_path}/hangs.py; every", problem.message)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_program_keeps_its_own_timer_when_it_loads_a_function(tmp_path, monkeypatch):
    def handler(*_: object) -> None:
        pass

    (tmp_path / "rewards.py").write_text("def get(row): return 1.0\n")
    before = signal.signal(signal.SIGALRM, handler)
    monkeypatch.setattr(functions, "IMPORT_LIMIT_S", 1000.0)
    try:
        signal.setitimer(signal.ITIMER_REAL, 500.0, 7.0)
        functions.load_function("rewards.py:get", base=tmp_path)
        left_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        found = signal.signal(signal.SIGALRM, before)

    assert (0.0 < left_s <= 500.0, interval_s, found) == (True, 7.0, handler)


@pytest.mark.parametrize("spec", ["rewards.py", "rewards.py:", ":get", "rewards.py:a-b", ""])
def test_what_names_no_function_gets_an_error_with_the_form(tmp_path, spec):
    assert "write path/to/file.py:function or package.module:function" in refused(spec, tmp_path)
