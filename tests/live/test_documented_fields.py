"""The table of fields in docs/guides/gateway.md, against what each API reads and ignores."""

import re
from pathlib import Path

import msgspec
import pytest

from asyncrl.live.apis import chat, completions, messages, responses
from asyncrl.live.apis.registry import APIS

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "gateway.md"
ROWS = {"chat completions": chat, "Responses": responses, "Messages": messages, "completions": completions}
USER = {"role": "user", "content": "Hi"}
MINIMAL = {
    "chat": {"model": "tiny", "messages": [USER]},
    "responses": {"model": "tiny", "input": "Hi"},
    "messages": {"model": "tiny", "messages": [USER], "max_tokens": 9},
    "completions": {"model": "tiny", "prompt": "Hi"},
}


def documented(row: str) -> tuple[list[str], list[str]]:
    """Return the names in the two columns of a row, in their order."""
    (line,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| {row} | `model`"))
    read, ignored = (re.findall(r"`([^`]+)`", column) for column in line.split("|")[2:4])
    return read, ignored


@pytest.mark.parametrize("row", ROWS)
def test_the_page_names_each_field_that_is_read_or_ignored_and_no_other(row: str):
    read, ignored = documented(row)

    assert sorted(read) == sorted(ROWS[row].READ)
    assert sorted(name for name in ignored if "." not in name) == sorted(ROWS[row].IGNORED)


@pytest.mark.parametrize(("api", "row"), zip(APIS, ROWS, strict=True))
def test_what_the_page_calls_ignored_changes_nothing_whatever_it_holds(api: str, row: str):
    for name in documented(row)[1]:
        field, _, inner = name.partition(".")
        for value in ("high", 5, True, ["a"], {"a": "b"}):
            body = MINIMAL[api] | {field: {inner: value} if inner else value}
            request = APIS[api].parse(msgspec.json.encode(body))
            plain = msgspec.structs.replace(request, repeated={})
            assert plain == APIS[api].parse(msgspec.json.encode(MINIMAL[api])), (name, value)
