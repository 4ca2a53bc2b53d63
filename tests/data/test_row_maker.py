"""Rows are made in a process of their own: in order, ahead of their use, and whatever happens there."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.row_maker import RowMaker, RowMakerDown, sample_rows
from asyncrl.data.sources import RowSetup, RowsPart, open_source
from asyncrl.environments.protocol import DataError
from harness import gyms
from harness.stage import until


@asynccontextmanager
async def maker(
    spec: str, base: Path, *, limit_s: float = 60.0, seed: int = 1, **options: Any
) -> AsyncIterator[RowMaker]:
    made = await RowMaker.open(RowSetup([RowsPart(spec, options)], [0], seed, str(base), limit_s))
    try:
        yield made
    finally:
        await made.close()


async def test_rows_are_those_of_the_source_whatever_was_wanted_before(tmp_path: Path):
    source = open_source("reverse", options={"letters": 9}, seed=3, base=tmp_path)
    async with maker("reverse", tmp_path, seed=3, letters=9) as rows:
        rows.want(range(5))
        assert [await rows.row(number) for number in range(5)] == [source.row(number) for number in range(5)]
        rows.want([7, 3])
        assert await rows.row(7) == source.row(7)
        assert rows.get(3) == source.row(3)
        assert rows.get(2) is None  # forgotten


async def test_rows_are_the_same_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = []
    for hash_seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        async with maker("reasoning-gym:isomorphic_strings", tmp_path) as rows:
            rows.want(range(3))
            found.append([await rows.row(number) for number in range(3)])

    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "data 'reasoning-gym:raises': row 2 cannot be made: (?s:.*)KeyError: 'no such board'"),
        ("hangs", "data 'reasoning-gym:hangs': row 2 was not made within task.row_limit_s = 2; raise it"),
    ],
)
async def test_a_row_that_cannot_be_made_is_an_error_for_those_who_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, words: str
):
    gyms.put_in_place(tmp_path, monkeypatch)
    async with maker(f"reasoning-gym:{how}", tmp_path, limit_s=2.0) as rows:
        rows.want(range(5))
        for needed in (rows.row(2), wait_for_get(rows, 2)):
            with pytest.raises(DataError, match=words):
                await asyncio.wait_for(needed, 120)

        assert (await rows.row(1)).prompt == "^1="
        assert (await rows.row(4)).prompt == "^4="


async def test_a_row_that_takes_too_long_leaves_no_other_row_waiting_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gyms.put_in_place(tmp_path, monkeypatch)
    async with maker("reasoning-gym:hangs", tmp_path, limit_s=1.0) as rows:
        rows.want([2])
        rows.want([1, 2])  # as for a group that is issued again: before the row that is being made
        assert (await asyncio.wait_for(rows.row(1), 120)).prompt == "^1="
        with pytest.raises(DataError, match="row 2 was not made"):
            await asyncio.wait_for(rows.row(2), 120)
        rows.want([7])
        assert (await asyncio.wait_for(rows.row(7), 120)).prompt == "^7="


async def wait_for_get(rows: RowMaker, number: int) -> None:
    await until(lambda: rows.get(number) is not None, f"row {number}")


async def test_the_death_of_the_process_is_the_error_of_the_row_that_was_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gyms.put_in_place(tmp_path, monkeypatch)
    async with maker("reasoning-gym:dies", tmp_path) as rows:
        rows.want(range(5))

        with pytest.raises(RowMakerDown, match=r"'reasoning-gym:dies': row 2 was not made: .*: killed by SIGKILL"):
            await asyncio.wait_for(rows.row(2), 120)
        assert (await asyncio.wait_for(rows.row(4), 120)).prompt == "^4="


async def test_a_maker_without_work_has_no_limit_and_outlives_its_process(tmp_path: Path):
    async with maker("reverse", tmp_path, limit_s=1.0) as rows:
        rows.want([0])
        await rows.row(0)
        await asyncio.sleep(2.0)  # two limits: nothing is to be made, and nothing is overdue
        [child] = rows._pool._children

        child.link.process.kill()
        await until(lambda: not rows._pool._children, "its end is noticed")

        rows.want([1])
        assert (await asyncio.wait_for(rows.row(1), 120)).prompt.startswith("^")


async def test_time_in_which_the_parent_was_stopped_is_not_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gyms.put_in_place(tmp_path, monkeypatch)
    async with maker("reasoning-gym:slow", tmp_path, limit_s=2.0, seconds=1.0) as rows:
        rows.want([0])
        await asyncio.sleep(0.1)
        time.sleep(4.0)  # as if it were stopped: the row is made meanwhile, and the limit is over

        assert (await asyncio.wait_for(rows.row(0), 120)).prompt == "^0="


async def test_data_that_cannot_serve_is_reported_at_the_opening(tmp_path: Path):
    with pytest.raises(DataError, match=r"rows.jsonl: no such file"):
        await RowMaker.open(RowSetup([RowsPart("rows.jsonl")], [0], 1, str(tmp_path)))


async def test_a_listing_that_takes_longer_than_opening_may_is_ended_and_the_setting_named(tmp_path: Path):
    rows = "import threading\n\ndef slow(seed):\n    threading.Event().wait(60)\n    yield {'prompt': '^0='}\n"
    (tmp_path / "own.py").write_text(rows)
    with pytest.raises(DataError, match=r"own.py:slow': not loaded within 5 s; raise task.open_limit_s"):
        await RowMaker.open(RowSetup([RowsPart("own.py:slow")], [0], 1, str(tmp_path), open_limit_s=5.0))


async def test_a_file_reports_its_epoch_and_its_longest_rows(tmp_path: Path):
    lines = [f'{{"prompt": "{"x" * length}"}}\n' for length in (3, 90, 5, 70)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    rows = await RowMaker.open(RowSetup([RowsPart("rows.jsonl")], [0], 1, str(tmp_path), longest=2))
    await rows.close()
    source = open_source("rows.jsonl", options={}, seed=1, base=tmp_path)

    assert rows.opened.rows_per_epoch == 4
    assert rows.opened.description == "rows.jsonl: 4 rows"
    assert [len(source.row(place).prompt) for place in rows.opened.longest] == [90, 70]


async def test_a_sample_is_the_rows_that_can_be_made_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gyms.put_in_place(tmp_path, monkeypatch)
    setup = RowSetup([RowsPart("reasoning-gym:hangs")], [0], 1, str(tmp_path))

    opened, rows = await sample_rows(setup, 1000, 1.0)

    assert opened.description == "reasoning-gym hangs"
    assert [row.prompt for row in rows] == ["^0=", "^1="]


async def test_a_sample_of_data_whose_first_row_cannot_be_made_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gyms.put_in_place(tmp_path, monkeypatch)
    setup = RowSetup([RowsPart("reasoning-gym:slow", {"seconds": 60.0})], [0], 1, str(tmp_path), row_limit_s=0.2)

    with pytest.raises(DataError, match=r"row 0 was not made within task\.row_limit_s = 0\.2"):
        await sample_rows(setup, 1000, 0.1)
