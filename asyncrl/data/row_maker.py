"""Rows of a data source, made in a child process ahead of their use.

Nothing that a data set does, be it slow, stuck or fatal, reaches the process that needs its rows. A row depends on the
data, the seed and its number alone, so a process that takes over gets the same rows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from asyncrl.child_pool.frames import CallFailed, Service, Setup
from asyncrl.child_pool.pool import ChildPool, LoadEnded, LoadLate
from asyncrl.data.curriculum import LadderSource
from asyncrl.data.file_source import FileSource
from asyncrl.data.sources import RowSetup, open_rows
from asyncrl.environments.protocol import DataError
from asyncrl.errors import AsyncRLError, FunctionError, last_lines
from topics.prompts import PromptRow

_ROW_BYTES = (1 << 32) - 1  # as large as a frame can be


class Opened(msgspec.Struct):
    """The properties of data that is open."""

    rows_per_epoch: int | None
    description: str
    longest: list[int]  # places in the first epoch


class RowMakerDown(AsyncRLError):
    """The process that makes rows has ended; another one may do better."""


def serve_rows(setup: dict[str, Any]) -> Service:
    """Open data in the process that makes its rows.

    Raises:
        DataError: it cannot serve.
    """
    wanted = msgspec.convert(setup, RowSetup)
    try:
        source = open_rows(wanted)
    except DataError:
        raise
    except Exception as error:  # any exception of a package at import
        raise DataError(f"data {wanted.spec!r} cannot be opened: {last_lines(error, skip=1)}") from error
    places = source.longest(wanted.longest) if isinstance(source, FileSource | LadderSource) else []
    return Service(source.row, about=Opened(source.rows_per_epoch, source.describe(), places))


class RowMaker:
    """The next rows that are already made."""

    def __init__(self, setup: RowSetup, pool: ChildPool, on_rows: Callable[[], None]) -> None:
        self.opened = msgspec.convert(pool.about, Opened)
        self._spec, self._limit_s = setup.spec, setup.row_limit_s
        self._pool = pool
        self._on_rows = on_rows
        self._rows: dict[int, asyncio.Task[PromptRow]] = {}  # wanted, made or not

    @classmethod
    async def open(cls, setup: RowSetup, on_rows: Callable[[], None] = lambda: None) -> RowMaker:
        """Start the process and open the data there.

        Args:
            on_rows: called whenever a row was made, or cannot be.

        Raises:
            DataError: the data cannot serve.
            RowMakerDown: the process ended.
        """
        arguments = {"setup": msgspec.to_builtins(setup)}
        service = Setup(
            f"data {setup.spec!r}",
            f"{__name__}:serve_rows",
            arguments,
            setup.row_limit_s,
            load_limit_s=setup.open_limit_s,
            reply_bytes=_ROW_BYTES,
        )
        try:
            pool = await ChildPool.open(service, workers=1)
        except LoadEnded as error:
            raise RowMakerDown(str(error)) from error
        except LoadLate as error:
            raise DataError(f"{error}; raise task.open_limit_s") from error
        except FunctionError as error:
            raise DataError(str(error)) from error
        return cls(setup, pool, on_rows)

    @property
    def making(self) -> int | None:
        """The row that is being made."""
        return next((number for number, row in self._rows.items() if not row.done()), None)

    def __contains__(self, number: int) -> bool:
        """Return whether a row is wanted, made or not."""
        return number in self._rows

    def want(self, numbers: Iterable[int]) -> None:
        """Have these rows made in this order, and forget all others."""
        known = self._rows
        self._rows = {
            number: known.pop(number) if number in known else self._begin(number) for number in dict.fromkeys(numbers)
        }
        for forgotten in known.values():
            forgotten.cancel()

    def get(self, number: int) -> PromptRow | None:
        """A wanted row, if it is made.

        Raises:
            DataError: it cannot be made, or takes too long.
            RowMakerDown: its process ended.
        """
        row = self._rows.get(number)
        return row.result() if row is not None and row.done() else None

    async def row(self, number: int) -> PromptRow:
        """A wanted row, once it is made.

        Raises:
            DataError: it cannot be made, or takes too long.
            RowMakerDown: its process ended.
        """
        return await asyncio.shield(self._rows[number])

    async def close(self) -> None:
        """End the process."""
        for row in self._rows.values():
            row.cancel()
        await self._pool.close()

    def _begin(self, number: int) -> asyncio.Task[PromptRow]:
        row = asyncio.create_task(self._make(number))
        row.add_done_callback(self._made)
        return row

    def _made(self, row: asyncio.Task[PromptRow]) -> None:
        if not row.cancelled():
            row.exception()  # requested once: a row that is not needed is no fault
            self._on_rows()

    async def _make(self, number: int) -> PromptRow:
        try:
            return msgspec.convert(await self._pool.call(number), PromptRow)
        except CallFailed as error:
            if error.reason == "raised":
                raise DataError(f"data {self._spec!r}: row {number} cannot be made: {error.detail}") from None
            if error.reason == "time_limit":
                hint = f"within task.row_limit_s = {self._limit_s:g}; raise it, or change the options of the data"
                raise DataError(f"data {self._spec!r}: row {number} was not made {hint}") from None
            raise RowMakerDown(f"data {self._spec!r}: row {number} was not made: {error.detail}") from None


async def sample_rows(setup: RowSetup, count: int, within_s: float) -> tuple[Opened, list[PromptRow]]:
    """Open data, and read its first and its longest rows: at least one, and no more than can be made in some seconds.

    Args:
        count: of the first rows; of the longest there are `setup.longest`.

    Raises:
        DataError: the data cannot serve, or the first row cannot be made.
        RowMakerDown: the process ended.
    """
    maker = await RowMaker.open(setup)
    rows: list[PromptRow] = []
    try:
        numbers = list(dict.fromkeys([*range(min(count, maker.opened.rows_per_epoch or count)), *maker.opened.longest]))
        maker.want(numbers)
        rows.append(await maker.row(numbers[0]))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                for number in numbers[1:]:
                    rows.append(await maker.row(number))
        return maker.opened, rows
    finally:
        await maker.close()
