from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from asyncrl.data.sources import MixedSource, label_reader
from asyncrl.environments.protocol import DataError, DataSource
from asyncrl.epochs import epoch_order
from harness.data_files import opened, refused, write_rows
from topics.prompts import PromptRow

EXAMPLES = Path(__file__).parents[2] / "asyncrl" / "examples"


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{number}", "label": number} for number in range(count)]


def first(source: DataSource, count: int) -> list[Any]:
    return [source.row(index).label for index in range(count)]


# Order


def test_every_epoch_shows_each_row_once_and_in_another_order(tmp_path):
    labels = first(opened(write_rows(tmp_path, numbered(50))), 100)

    assert sorted(labels[:50]) == sorted(labels[50:]) == list(range(50))
    assert labels[:50] != labels[50:] != list(range(50))


def test_a_row_depends_on_seed_and_place_alone(tmp_path):
    write_rows(tmp_path, numbered(30))
    labels = first(opened(tmp_path), 900)
    again = opened(tmp_path)

    assert [again.row(index).label for index in (899, 0, 450, 31)] == [labels[index] for index in (899, 0, 450, 31)]
    assert first(opened(tmp_path, seed=2), 30) != labels[:30]


def test_the_order_of_an_epoch_never_changes_between_releases():
    assert epoch_order(10, 1, 0).tolist() == [7, 8, 3, 1, 2, 9, 5, 4, 0, 6]
    assert epoch_order(10, -1, 3).tolist() == [7, 6, 4, 8, 1, 0, 9, 2, 3, 5]


def test_orders_are_even_over_places():
    counts = [0] * 5
    for epoch in range(2000):
        counts[int(epoch_order(5, 9, epoch)[0])] += 1

    assert sum((count - 400) ** 2 / 400 for count in counts) < 25  # chi-square with 4 degrees: p < 1e-4 beyond


# Files


def test_prompt_label_and_metadata_are_read_under_other_names_too(tmp_path):
    write_rows(tmp_path, [{"question": "1+1", "answer": "2", "info": {"level": 3}, "id": 9}])

    row = opened(tmp_path, prompt_key="question", label_key="answer", metadata_key="info").row(0)

    assert row == PromptRow("1+1", "2", {"level": 3})


def test_chat_messages_are_a_prompt(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    write_rows(tmp_path, [{"prompt": chat, "label": None}])

    assert opened(tmp_path).row(0) == PromptRow(chat)


@pytest.mark.parametrize(
    ("bounds", "labels"), [("0:3", {0, 1, 2}), (":2", {0, 1}), ("8:", {8, 9}), ("-2:", {8, 9}), ("1:-7", {1, 2})]
)
def test_a_slice_selects_rows(tmp_path, bounds, labels):
    write_rows(tmp_path, numbered(10))
    table = pyarrow.Table.from_pylist(numbered(10))
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=3)

    for spec in (f"rows.jsonl@[{bounds}]", f"rows.parquet@[{bounds}]"):
        source = opened(tmp_path, spec)
        assert source.rows_per_epoch == len(labels)
        assert set(first(source, len(labels))) == labels


def test_parquet_gives_the_same_rows_as_jsonl(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": f"q{n}"}], "label": n, "metadata": {"n": n}, "x": 1} for n in range(9)
    ]
    write_rows(tmp_path, rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")

    lines, table = opened(tmp_path), opened(tmp_path, "rows.parquet")

    assert [lines.row(index) for index in range(9)] == [table.row(index) for index in range(9)]


def test_blank_lines_are_no_rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text('\n{"prompt": "a"}\n  \n{"prompt": "b"}')

    assert opened(tmp_path).rows_per_epoch == 2


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')

    assert opened(tmp_path).row(0).prompt == "a"


def test_the_shipped_questions_are_rows_with_labels():
    source = opened(EXAMPLES, "questions.jsonl", labels_for="the reward")

    assert source.describe() == "questions.jsonl: 32 rows"
    for index in range(32):
        row = source.row(index)
        assert row.prompt == f"^{row.label[::-1]}="


# Bad input


def test_a_missing_file_is_named(tmp_path):
    assert "nowhere.jsonl: no such file" in refused(tmp_path, "nowhere.jsonl")


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n\n")

    assert "the file is empty" in refused(tmp_path)


def test_a_broken_line_is_named_by_its_number(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "a"}\n\n{"prompt": \n{"prompt": "b"}\n{"prompt": "\xff"}\n')

    text = refused(tmp_path)

    assert "bad rows: 2" in text
    assert "line 3: " in text
    assert "line 5: " in text


def test_at_most_five_problems_are_listed(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{\n" * 9)

    text = refused(tmp_path)

    assert text.count("line ") == 5
    assert "... and 4 more" in text


def test_an_error_about_a_row_without_prompt_lists_its_fields(tmp_path):
    text = refused(write_rows(tmp_path, [{"question": "a"}]))

    assert "line 1: no prompt under 'prompt'; found 'question'" in text


@pytest.mark.parametrize(("prompt", "found"), [(None, "null"), ("", "empty"), ([], "empty"), (7, "a number")])
def test_an_error_about_a_wrong_prompt_names_its_type(tmp_path, prompt, found):
    text = refused(write_rows(tmp_path, [{"prompt": prompt, "label": 1}]))

    assert f"line 1: the prompt under 'prompt' is {found}; expected text or a list of chat messages" in text


CHAT = [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("hello", "is text"),
        ({"role": "user", "text": "abc"}, "has no 'content' but 'role', 'text'"),
        ({"content": "abc"}, "has no 'role' but 'content'"),
        ({}, "has no 'role' but nothing"),
        ({"role": "user", "content": None}, "has null as 'content'"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}]}, "has a list as 'content'"),
        ({"role": 1, "content": "a"}, "has a number as 'role'"),
        ({"role": "", "content": "a"}, "has an empty 'role'"),
    ],
)
def test_a_chat_message_without_role_or_content_is_refused(tmp_path, message, found):
    text = refused(write_rows(tmp_path, [{"prompt": CHAT}] * 1500 + [{"prompt": [*CHAT, message]}]))

    assert f'line 1501: message 1 of the prompt {found}; expected {{"role": text, "content": text}}' in text


def test_an_assistant_may_call_tools_instead_of_speaking(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}

    assert opened(write_rows(tmp_path, [{"prompt": [*CHAT, call]}])).rows_per_epoch == 1


def test_who_needs_a_label_is_named_and_a_chat_with_an_answer_is_its_own(tmp_path):
    answered = [*CHAT, {"role": "assistant", "content": "2"}]
    write_rows(tmp_path, [{"prompt": answered}, {"prompt": CHAT}, {"prompt": "a"}])

    warmup, reward = (refused(tmp_path, labels_for=who) for who in ("the warm-up", "the reward"))

    assert [line.split(";")[0] for line in warmup.splitlines()[1:]] == [
        f"  line {number}: the warm-up needs a label and there is none under 'label'" for number in (2, 3)
    ]
    assert reward.count("the reward needs a label") == 3
    assert label_reader(graded=False, warmup_steps=5) == "the warm-up"
    assert label_reader(graded=True, warmup_steps=5) == "the reward"
    assert label_reader(graded=False, warmup_steps=0) == ""


def test_a_missing_label_is_an_error_only_where_the_reward_needs_it(tmp_path):
    write_rows(tmp_path, [{"prompt": "a", "label": "b"}, {"prompt": "a", "answer": "b"}])

    assert opened(tmp_path).rows_per_epoch == 2
    text = refused(tmp_path, labels_for="the reward")
    assert "line 2: the reward needs a label and there is none under 'label'; found 'prompt', 'answer'" in text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["a"], "expected an object with the key 'prompt', found a list"),
        ({"prompt": "a", "metadata": "x"}, "'metadata' is text; expected an object"),
        ({"prompt": "a", "label": 10**30}, "line 1: 'label' has an integer"),
    ],
)
def test_a_row_of_another_shape_is_refused(tmp_path, row, message):
    assert message in refused(write_rows(tmp_path, [row]))


@pytest.mark.parametrize("bounds", ["5", "a:b", "0:10:2", ""])
def test_a_bad_slice_is_refused(tmp_path, bounds):
    text = refused(write_rows(tmp_path, numbered(3)), f"rows.jsonl@[{bounds}]")

    assert f"bad slice @[{bounds}]; write @[FROM:TO]" in text


def test_a_slice_without_rows_is_refused(tmp_path):
    assert "slice @[5:] selects no row" in refused(write_rows(tmp_path, numbered(3)), "rows.jsonl@[5:]")


def test_what_is_no_parquet_file_is_refused(tmp_path):
    (tmp_path / "rows.parquet").write_text("hello")

    assert "not a Parquet file" in refused(tmp_path, "rows.parquet")


def test_an_error_about_a_parquet_file_without_prompt_lists_its_columns(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"question": "a"}]), tmp_path / "rows.parquet")

    text = refused(tmp_path, "rows.parquet")
    assert """no prompt under 'prompt'; found 'question'; the option prompt_key = "question" would read that""" in text


@pytest.mark.parametrize("spec", ["rows.csv", "revers", "reverse:3", ""])
def test_unknown_data_is_refused_with_what_is_known(tmp_path, spec):
    text = refused(tmp_path, spec)

    assert (
        f"unknown data {spec!r}; known are FILE.jsonl, FILE.parquet, reverse, sum, reasoning-gym:NAME, text:NAME"
        in text
    )
    assert "openenv:NAME, FILE.py:FUNCTION, MODULE:FUNCTION" in text


def test_an_error_about_a_data_set_of_a_hub_says_how_to_fetch_it(tmp_path):
    assert "first: hf download openai/gsm8k --repo-type dataset --local-dir gsm8k" in refused(tmp_path, "openai/gsm8k")
    assert "hf download" not in refused(tmp_path, "reverse:3")


@pytest.mark.parametrize("spec", ["rows.jsonl", "reverse", "sum", "reasoning-gym:leg_counting"])
def test_an_unknown_option_is_refused_with_those_there_are(tmp_path, spec):
    text = refused(write_rows(tmp_path, numbered(3)), spec, colour="red")

    assert f"data {spec!r} has no option colour; it takes " in text


@pytest.mark.parametrize(("spec", "options"), [("reverse", {"letters": 0}), ("sum", {"digits": "two"})])
def test_an_option_out_of_range_is_refused(tmp_path, spec, options):
    assert f"data {spec!r}: " in refused(tmp_path, spec, **options)


# Rules


def test_reverse_asks_for_the_letters_backwards(tmp_path):
    row = opened(tmp_path, "reverse").row(5)

    assert len(row.prompt) == 10
    assert row.prompt == f"^{row.label[::-1]}="


def test_sum_asks_for_the_sum(tmp_path):
    source, backwards = opened(tmp_path, "sum", digits=3), opened(tmp_path, "sum", digits=3, reversed=True)

    for index in range(50):
        row = source.row(index)
        left, right = row.prompt.strip("^=").split("+")
        assert len(left) == len(right) == 3
        assert int(left) + int(right) == int(row.label)
        assert backwards.row(index) == PromptRow(row.prompt, row.label[::-1])


def test_sums_of_several_terms_are_asked_for_in_a_chat_message(tmp_path):
    source = opened(tmp_path, "sum", digits=3, terms=4, chat=True)

    for index in range(50):
        row = source.row(index)
        [message] = row.prompt
        question = re.fullmatch(r"What is (\d+(?: \+ \d+){3})\? Answer with a number only\.", message["content"])
        terms = [int(term) for term in question[1].split(" + ")]
        assert all(100 <= term <= 999 for term in terms)
        assert (message["role"], sum(terms)) == ("user", int(row.label))
    with pytest.raises(DataError, match="16 terms of 9 digits; expected 128 digits in all at most"):
        opened(tmp_path, "sum", digits=9, terms=16)


@pytest.mark.parametrize("spec", ["reverse", "sum", "reasoning-gym:leg_counting"])
def test_rules_give_the_same_row_at_the_same_place_and_others_under_another_seed(tmp_path, spec):
    options = {} if spec.startswith("reasoning") else {"letters" if spec == "reverse" else "digits": 12}
    one, again, other = (opened(tmp_path, spec, seed=seed, **options) for seed in (1, 1, 2))

    rows = [one.row(index) for index in range(0, 1000, 5)]

    assert [again.row(index) for index in range(995, -1, -5)] == rows[::-1]
    assert not {row.prompt for row in rows} & {other.row(index).prompt for index in range(0, 1000, 5)}
    assert one.rows_per_epoch is None


def test_letters_are_drawn_evenly(tmp_path):
    source = opened(tmp_path, "reverse", letters=26)
    text = "".join(source.row(index).label for index in range(1000))

    assert all(math.isclose(text.count(letter), 1000, abs_tol=160) for letter in set(text))  # five deviations
    assert len(set(text)) == 26


def test_descriptions_give_the_number_of_prompts(tmp_path):
    assert opened(tmp_path, "reverse", letters=4).describe() == "reverse: 4 letters, 26**4 prompts"
    assert opened(tmp_path, "sum", reversed=True).describe() == "sum: 2 digits, lowest digit first, 100**2 prompts"
    assert opened(tmp_path, "reasoning-gym:leg_counting", max_animals=4).describe() == (
        "reasoning-gym leg_counting, max_animals=4"
    )


def test_a_reasoning_gym_row_has_the_answer_and_what_its_scorer_needs(tmp_path):
    row = opened(tmp_path, "reasoning-gym:leg_counting", min_animals=2, max_animals=3).row(1234)

    assert "legs" in row.prompt
    assert row.label.isdigit()
    assert row.metadata["source_dataset"] == "leg_counting"
    assert row.metadata["source_options"] == {"min_animals": 2, "max_animals": 3}


def test_an_unknown_reasoning_gym_dataset_is_refused_with_close_names(tmp_path):
    assert "close: leg_counting" in refused(tmp_path, "reasoning-gym:leg_count")


def test_an_option_that_a_dataset_refuses_is_reported(tmp_path):
    text = refused(tmp_path, "reasoning-gym:leg_counting", min_animals=9, max_animals=2)

    assert "reasoning-gym:leg_counting refuses its options: " in text


def test_mixed_rows_are_taken_in_turn_and_each_part_has_its_own_order(tmp_path):
    write_rows(tmp_path, numbered(5))
    write_rows(tmp_path, [{"prompt": "q", "label": 100 + number} for number in range(3)], "others.jsonl")
    parts = opened(tmp_path), opened(tmp_path, "others.jsonl")
    mixed = MixedSource(parts, [0, 0, 1])

    labels = first(mixed, 9)

    assert [label for label in labels if label < 100] == first(parts[0], 6)
    assert [label for label in labels if label >= 100] == first(parts[1], 3)
    assert [label >= 100 for label in labels] == [False, False, True] * 3
    assert mixed.rows_per_epoch == 7  # the sixth row of the first part, at place 7, is its first one again
    assert MixedSource([opened(tmp_path, "sum"), opened(tmp_path, "reverse")], [0, 1]).rows_per_epoch is None
