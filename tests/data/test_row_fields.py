"""Fields of rows in files: keys, columns that hold JSON as text, nulls of Parquet, and files of another kind."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from harness.data_files import opened, refused, write_rows
from topics.prompts import PromptRow


def test_an_error_about_a_missing_label_lists_all_columns_and_proposes_a_key(tmp_path):
    row = {"prompt": "a", "data_source": "x", "reward_model": {"style": "rule", "ground_truth": "6"}}
    table = pyarrow.Table.from_pylist([row, {**row, "reward_model": None}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    write_rows(tmp_path, [row])

    for name in ("rows.jsonl", "rows.parquet"):
        text = refused(tmp_path, name, labels_for="the reward")
        assert "none under 'label'; found 'prompt', 'data_source', 'reward_model'; the option label_key = " in text
        assert 'label_key = "reward_model.ground_truth" would read' in text


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_key_with_dots_reads_a_field_of_an_object(tmp_path, name):
    row = {"prompt": "a", "reward_model": {"ground_truth": "6"}, "extra": {"info": {"n": 1}}, "a.b": "c"}
    write_rows(tmp_path, [row])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")

    found = opened(tmp_path, name, label_key="reward_model.ground_truth", metadata_key="extra.info").row(0)

    assert found == PromptRow("a", "6", {"n": 1})
    assert opened(tmp_path, name, label_key="a.b").row(0).label == "c"
    assert opened(tmp_path, name, label_key="reward_model.style").row(0).label is None


def test_a_parquet_row_has_no_nulls_in_its_objects_but_those_of_lists(tmp_path):
    def call(**arguments):
        return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    rows = [
        {"prompt": [{"role": "user", "content": "q"}, call(city="oslo")], "metadata": {"l": [1, None], "x": {"a": 1}}},
        {"prompt": [call(a=1, b=2), {"role": "tool", "content": "3"}], "metadata": {"l": [], "x": {"b": 1}}},
    ]
    write_rows(tmp_path, rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")

    lines, table = opened(tmp_path), opened(tmp_path, "rows.parquet")

    assert [table.row(index) for index in range(2)] == [lines.row(index) for index in range(2)]


def test_a_parquet_map_is_an_object(tmp_path):
    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    table = pyarrow.table({"prompt": ["a"], "metadata": pyarrow.array([[("n", 1)]], kind)})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")

    assert opened(tmp_path, "rows.parquet").row(0).metadata == {"n": 1}


# Columns that hold JSON as text


CHAT = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize("key", ["prompt", "messages", "question"])
def test_messages_as_json_text_are_messages(tmp_path, key):
    write_rows(tmp_path, [{key: json.dumps(CHAT), "metadata": json.dumps({"a": 1})}])

    options = {"prompt_key": key} if key == "question" else {}
    assert opened(tmp_path, **options).row(0) == PromptRow(CHAT, None, {"a": 1})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": str(CHAT)}, "the text under 'prompt' is no JSON of chat messages: \"[{'role': 'user'"),
        ({"messages": "1+1"}, "the text under 'messages' is no JSON of chat messages: '1+1'; write it by json.dumps"),
        ({"messages": '[{"content": "a"}]'}, "the text under 'messages' is no JSON of chat messages"),
        ({"prompt": '[{"role": "user"}]'}, "message 0 of the prompt has no 'content'"),
        ({"prompt": "a", "metadata": "{'a': 1}"}, "'metadata' is text; expected an object, or the JSON of one"),
        ({"prompt": "a", "metadata": "null"}, "'metadata' is text; expected an object"),
    ],
)
def test_text_that_is_no_json_of_messages_or_metadata_is_refused(tmp_path, row, message):
    assert message in refused(write_rows(tmp_path, [row]))


@pytest.mark.parametrize("text", ["[1, 2]: what is the sum?", "[]", '[{"name": "a"}]', "[{x}]"])
def test_other_text_that_begins_with_a_bracket_is_a_prompt(tmp_path, text):
    assert opened(write_rows(tmp_path, [{"prompt": text}])).row(0).prompt == text


# Files of another kind


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[\n{"prompt": "a"}\n]', "the file is a JSON array, expected one object per line; convert it with jq"),
        (b' [{"prompt": "a"}, {"prompt": "b"}]', "the file is a JSON array"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "the text is UTF-16, expected UTF-8"),
        (b'{"prompt": "a", "label": 100000000000000000000}', "'label' has an integer of more than 64 bits"),
        (
            b'{"prompt": "a", "metadata": {"n": 100000000000000000000}}',
            "'metadata' has an integer of more than 64 bits",
        ),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, content, message):
    (tmp_path / "rows.jsonl").write_bytes(content)

    assert message in refused(tmp_path)
