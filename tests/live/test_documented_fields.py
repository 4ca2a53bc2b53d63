"""The table of ignored fields in docs/guides/gateway.md, against what each API ignores."""

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


def documented(row: str) -> list[str]:
    """Return the ignored fields that the page names for an API."""
    table = PAGE.read_text().partition("| API | ignored fields |")[2]
    (line, *_) = (line for line in table.splitlines() if line.startswith(f"| {row} |"))
    return re.findall(r"`([^`]+)`", line)


@pytest.mark.parametrize("row", ROWS)
def test_the_page_names_each_field_that_is_ignored_and_no_other(row: str):
    assert sorted(name for name in documented(row) if "." not in name) == sorted(ROWS[row].IGNORED)


@pytest.mark.parametrize(("api", "row"), zip(APIS, ROWS, strict=True))
def test_what_the_page_calls_ignored_changes_nothing_whatever_it_holds(api: str, row: str):
    for name in documented(row):
        field, _, inner = name.partition(".")
        for value in ("high", 5, True, ["a"], {"a": "b"}):
            body = MINIMAL[api] | {field: {inner: value} if inner else value}
            request = APIS[api].parse(msgspec.json.encode(body))
            plain = msgspec.structs.replace(request, repeated={})
            assert plain == APIS[api].parse(msgspec.json.encode(MINIMAL[api])), (name, value)
