"""Each kind of judges is described by its file, and opens a judge."""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_args, get_type_hints

import pytest

from asyncrl.config.live_settings import JUDGES, JudgeKind, JudgeSettings, judge_kind
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.judges.protocol import Judge, JudgeParts
from asyncrl.training.init_model import write_tokenizer

ROOT = Path(__file__).parents[2] / "asyncrl" / "judges"


def test_the_kinds_that_settings_take_are_the_files_with_a_description():
    assert get_args(get_type_hints(JudgeSettings)["kind"]) == ("", *JUDGES)
    assert {path.stem for path in ROOT.glob("*.py") if "\nKIND = " in path.read_text()} == set(JUDGES)


@pytest.mark.parametrize("name", JUDGES)
async def test_a_kind_names_settings_that_exist_and_opens_a_judge(name: str, tmp_path: Path):
    kind, settings = judge_kind(name), JudgeSettings(kind=name, url="http://host:1/v1", model="m")
    write_tokenizer(tmp_path, "ab", context=8)

    async def open_generator() -> Any:
        return None  # it is asked with the first vote

    assert isinstance(kind, JudgeKind)
    assert set(kind.keys) <= set(JudgeSettings.__struct_fields__) - {"kind", "workers", "votes"}
    assert not [*kind.checks(settings)]
    assert kind.setup(settings, tmp_path) is None
    judge: Judge = await resolve_name(kind.opener)(
        JudgeParts(settings, tmp_path, TaskTokenizer.load(tmp_path), open_generator, 0)
    )
    assert judge.name.startswith(name)
    await judge.close()


@pytest.mark.parametrize("name", JUDGES)
def test_a_function_is_loaded_before_the_start_by_the_kind_that_calls_it(name: str, tmp_path: Path):
    kind, settings = judge_kind(name), JudgeSettings(kind=name, function="judge.py:vote")

    assert (kind.setup(settings, tmp_path) is not None) == ("function" in kind.keys)
    assert kind.hint_problem(settings) == ""
