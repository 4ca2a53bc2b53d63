"""Rows of JSONL and Parquet files, checked and encoded as prompts of a task."""

from __future__ import annotations

import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from asyncrl.data.row_fields import MESSAGES, Keys, encode_row, field_names
from asyncrl.environments.protocol import DataError
from asyncrl.errors import last_lines
from topics.prompts import PromptRow

_SHOWN_PROBLEMS = 5
_BOUNDS = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")
_ARRAY = re.compile(rb"\s*\[\s*(\{|$)")  # first line of a file that is one JSON array
_Convert: TypeAlias = Callable[[Any], Any]
_Rows: TypeAlias = Iterator[tuple[str, Any]]  # places and rows


def read_rows(path: Path, *, bounds: str, keys: Keys, labels_for: str, convert: _Convert | None = None) -> list[bytes]:
    """Read the rows of a JSONL or Parquet file that `bounds`, such as `10:-10`, selects.

    Args:
        convert: makes each row of the file one of the task's; None leaves it out.

    Returns:
        Each row as MessagePack of a `PromptRow`.

    Raises:
        DataError: with up to five of the file's problems.
    """
    selected = _BOUNDS.fullmatch(bounds)
    if selected is None:
        raise DataError(f"{path.name}: bad slice @[{bounds}]; write @[FROM:TO], each a whole number or left out")
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    read = _read_jsonl if path.suffix == ".jsonl" else _read_parquet
    rows: list[bytes] = []
    problems: list[str] = []
    left_out = 0
    columns, found_rows = read(path, slice(*(int(text) if text else None for text in selected.groups())), keys)
    for place, value in found_rows:
        try:
            found = msgspec.json.decode(value) if isinstance(value, bytes) else value
            if convert is not None and (found := _converted(convert, found)) is None:
                left_out += 1
                continue
            rows.append(encode_row(found, keys, labels_for, () if convert else columns))
        except (DataError, ValueError, OverflowError, TypeError) as error:
            problems.append(f"{place}: {error}")
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        tail = [f"... and {more} more"] if more > 0 else []
        raise DataError("\n  ".join([f"{path}: bad rows: {len(problems)}", *problems[:_SHOWN_PROBLEMS], *tail]))
    if not rows:
        if left_out:
            raise DataError(f"{path}: the function of the option convert leaves out all {left_out} rows")
        raise DataError(f"{path}: slice @[{bounds}] selects no row" if bounds != ":" else f"{path}: the file is empty")
    return rows


def _converted(convert: _Convert, row: Any) -> Any:
    try:
        found = convert(row)
    except Exception as error:  # anything may happen in a user's function
        raise DataError(f"the function of the option convert raises\n{last_lines(error)}") from error
    return msgspec.structs.asdict(found) if isinstance(found, PromptRow) else found


def _read_jsonl(path: Path, selected: slice, _keys: Keys) -> tuple[list[str], _Rows]:
    with path.open("rb") as file:
        begin = file.read(len(BOM_UTF8))
        if begin.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            raise DataError(f"{path}: the text is UTF-16, expected UTF-8; convert it with iconv -f UTF-16 -t UTF-8")
        if begin != BOM_UTF8:
            file.seek(0)
        lines = [(number, line) for number, line in enumerate(file, 1) if not line.isspace()]
    if lines and _ARRAY.match(lines[0][1]):
        raise DataError(f"{path}: the file is a JSON array, expected one object per line; convert it with jq -c '.[]'")
    return [], ((f"line {number}", line) for number, line in lines[selected])


def _read_parquet(path: Path, selected: slice, keys: Keys) -> tuple[list[str], _Rows]:
    """Return the names of all columns and of their fields, and the rows."""
    import pyarrow  # takes 50 MB, which readers of JSONL need not pay
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error
    with file:
        columns = field_names({field.name: _shape(field.type) for field in file.schema_arrow})
        prompt_key = keys.prompt_key if keys.prompt_key in columns else MESSAGES
        read = {prompt_key, keys.label_key, keys.metadata_key, keys.tools_key}
        roots = read | {key.partition(".")[0] for key in read}
        table = file.read(columns=[name for name in file.schema_arrow.names if keys.convert or name in roots])
    first, last, _ = selected.indices(table.num_rows)
    numbers = range(first, last)
    batches = table.slice(first, len(numbers)).to_batches()
    rows = (row for batch in batches for row in batch.to_pylist(maps_as_pydicts="strict"))
    named = ((f"row {number}", _without_nulls(row)) for number, row in zip(numbers, rows, strict=True))
    return columns, named


def _shape(kind: Any) -> dict[str, Any] | None:
    """Return an object with the fields of a struct type; None for another type."""
    import pyarrow

    if not isinstance(kind, pyarrow.StructType):
        return None
    return {field.name: _shape(field.type) for field in map(kind.field, range(kind.num_fields))}


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the nulls in its objects: all objects of a Parquet column have the fields of each."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cleaned(one) for name, one in value.items() if one is not None}
        return [cleaned(one) for one in value] if isinstance(value, list) else value

    return {name: cleaned(value) for name, value in row.items()}
