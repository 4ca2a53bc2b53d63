"""Data of the user's own: a function that makes rows, one that converts them, and rows with tools."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from asyncrl import functions
from asyncrl.config.load import load_config
from asyncrl.data import user_source
from asyncrl.data.sources import open_source
from asyncrl.environments.protocol import DataError
from asyncrl.run.preflight import check_surroundings
from harness.configs import the_problem

OWN = """
import random
import threading

class Numbers:
    def row(self, index):
        return {"prompt": f"^{index}=", "label": str(index)}

def some(seed, count=3):
    return [{"prompt": f"^{number}=", "label": str(number + seed)} for number in range(count)]

def endless(seed):
    return Numbers()

def unseeded(seed):
    return [{"prompt": "^1=", "label": str(random.random())} for _ in range(4)]

def of_a_table(seed):
    return [{"prompt": "^1=", "label": "1", "metadata": {"hint": float("nan")}}]

def no_label(seed):
    return [{"prompt": "^1=", "label": float("nan")}]

def nothing(seed):
    return []

def wrong(seed):
    return [{"question": "1"}]

def text(seed):
    return "rows"

def broken(seed):
    raise RuntimeError("no such table")

def convert(row):
    return {"prompt": row["q"], "label": row["a"]} if row["a"] else None

def bad_convert(row):
    return row["missing"]

def convert_none(row):
    return None

def unseeded_convert(row):
    return {"prompt": "^1=", "label": str(random.random())}

def hanging(seed):
    threading.Event().wait()

def stopping(seed):
    yield {"prompt": "^1=", "label": "1"}
    threading.Event().wait()

def slow(seed):
    for number in range(3):
        threading.Event().wait(0.3)
        yield {"prompt": f"^{number}=", "label": "1"}

def unending(seed):
    while True:
        yield {"prompt": "^1=", "label": "1"}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "rows.jsonl").write_text('{"q": "^0=", "a": "b"}\n{"q": "^1=", "a": ""}\n{"q": "^2=", "a": "c"}\n')
    return tmp_path


def opened(base, spec, seed=1, **options):
    return open_source(spec, options=options, seed=seed, base=base)


def test_rows_of_a_function_are_those_of_a_file(folder):
    source = opened(folder, "own.py:some", count=5)

    assert source.rows_per_epoch == 5
    assert sorted(source.row(index).label for index in range(5)) == ["1", "2", "3", "4", "5"]


def test_an_object_makes_rows_without_end(folder):
    source = opened(folder, "own.py:endless")

    assert (source.rows_per_epoch, source.row(70).label) == (None, "70")


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("own.py:none", {}, "has no function 'none'"),
        ("own.py:some", {"size": 3}, "is called with seed and its options, and got an unexpected keyword"),
        ("own.py:nothing", {}, "has no row"),
        ("own.py:wrong", {}, "row 0: no prompt under 'prompt'; found 'question'"),
        ("own.py:text", {}, "answers text; expected rows"),
        ("own.py:broken", {}, "no such table"),
        ("own.py:unending", {}, "its iterator gave 100 rows and more, .* an object with row"),
        ("rows.jsonl", {"convert": "own.py:bad_convert"}, "line 1: the function of the option convert raises"),
        ("rows.jsonl", {"convert": "own.py:convert_none"}, "the function of the option convert leaves out all 3 rows"),
    ],
)
def test_a_function_that_cannot_serve_is_refused(folder, monkeypatch, spec, options, message):
    monkeypatch.setattr("asyncrl.data.user_source._MOST_ROWS", 100)
    with pytest.raises(DataError, match=message):
        opened(folder, spec, **options)


@pytest.mark.parametrize(("function", "line"), [("hanging", 49), ("stopping", 53)])
def test_a_function_that_hangs_while_it_opens_is_refused_with_its_line(folder, function, line):
    late = rf"own\.py:{function}': after 0\.1 s without a row; it had reached line {line} of .*; raise task.row_limit_s"

    with pytest.raises(DataError, match=late):
        open_source(f"own.py:{function}", options={}, seed=1, base=folder, row_limit_s=0.1)


def test_a_slow_function_may_take_the_limit_for_each_row_and_reports_how_far_it_is(folder, monkeypatch, capsys):
    opened(folder, "own.py:some")  # imported within the limit of imports, which is not that of rows
    monkeypatch.setattr(functions, "IMPORT_LIMIT_S", 0.1)
    monkeypatch.setattr(user_source, "_REPORT_S", 0.02)

    assert opened(folder, "own.py:slow").rows_per_epoch == 3
    assert "data 'own.py:slow': 2 rows after " in capsys.readouterr().err


def test_a_converter_reads_other_rows_and_leaves_some_out(folder):
    source = opened(folder, "rows.jsonl", convert="own.py:convert")
    table = pyarrow.Table.from_pylist([{"q": "^7=", "a": "seven", "other": 1}])
    pyarrow.parquet.write_table(table, folder / "rows.parquet")

    rows = sorted((source.row(index).prompt, source.row(index).label) for index in range(source.rows_per_epoch))
    assert rows == [("^0=", "b"), ("^2=", "c")]
    assert opened(folder, "rows.parquet", convert="own.py:convert").row(0).label == "seven"


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_of_a_row_are_those_that_its_chat_template_gets(tmp_path, as_text):
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    row = {"prompt": [{"role": "user", "content": "hi"}], "tools": json.dumps(tools) if as_text else tools}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))

    assert opened(tmp_path, "rows.jsonl").row(0).metadata == {"tools": tools}


def test_tools_that_are_no_list_of_objects_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "tools": "look up"}))

    with pytest.raises(DataError, match="the tools under 'tools' are no list of objects, nor the JSON of one"):
        opened(tmp_path, "rows.jsonl")


@pytest.mark.parametrize(
    ("data", "function"),
    [
        ('source = "own.py:unseeded"', "own.py:unseeded"),
        ('source = "rows.jsonl"\noptions.convert = "own.py:unseeded_convert"', "own.py:unseeded_convert"),
    ],
)
def test_check_names_rows_that_do_not_follow_from_the_seed(folder, data, function):
    (folder / "config.toml").write_text(f"[task]\n{data}\n[rollout]\nmax_new_tokens = 8\n")

    problem = the_problem(str(folder / "config.toml"), files=True)

    assert problem.key == "task.source"
    assert f"{function}: row 0 is another one when" in problem.message


def test_check_takes_a_value_that_a_table_has_not_and_names_a_label_that_it_has_not(folder):
    config = folder / "config.toml"
    config.write_text('[task]\nsource = "own.py:of_a_table"\n[rollout]\nmax_new_tokens = 8\n')
    load_config(str(config), further=check_surroundings)

    config.write_text(config.read_text().replace("of_a_table", "no_label"))
    assert (
        "row 0: the reward needs a label and there is none under 'label'"
        in the_problem(str(config), files=True).message
    )
