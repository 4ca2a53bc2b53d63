"""Rows of a data source, made in a child process ahead of their use.

Nothing that a data set does, be it slow, stuck or fatal, reaches the process that needs its rows. A row depends on the
data, the seed and its number alone, so a process that takes over gets the same rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterable

import msgspec

from asyncrl.data.protocol import DataError
from asyncrl.data.row_frames import Opened, RowMade, RowSetup, RowsWanted
from asyncrl.errors import AsyncRLError
from asyncrl.framing import Frames, pack
from asyncrl.process import ChildProcess, python
from topics.prompts import PromptRow

_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from asyncrl.data.row_child import main; main(int(sys.argv[1]))"
_OPEN_LIMIT_S = 600.0  # for a large file
_READ_BYTES = 1 << 18
_TICKS = 8  # of the limit of one row: time in which this process was stopped counts as one at most

_made = msgspec.msgpack.Decoder(RowMade)


class RowMakerDown(AsyncRLError):
    """The process that makes rows has ended; another one may do better."""


class RowMaker:
    """The rows that are wanted next, as far as they are made."""

    def __init__(self, setup: RowSetup, process: ChildProcess, *, limit_s: float, on_rows: Callable[[], None]) -> None:
        self.opened = Opened()
        self._spec = setup.spec
        self._child, self._process = process, process.process
        self._limit_s = limit_s
        self._on_rows = on_rows
        self._frames = Frames()
        self._rows: dict[int, asyncio.Future[PromptRow]] = {}  # wanted, made or not
        self._asked: dict[int, None] = {}  # asked for and not yet answered, in order
        self._ticks = 0  # since the row under way was begun
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._down: Exception | None = None  # why rows that are not made never will be

    @classmethod
    async def open(cls, setup: RowSetup, *, limit_s: float, on_rows: Callable[[], None] = lambda: None) -> RowMaker:
        """Start the process and open the data there.

        Args:
            limit_s: seconds that one row may take.
            on_rows: called whenever rows were made.

        Raises:
            DataError: the data cannot serve.
            RowMakerDown: the process ended.
        """
        process = await asyncio.create_subprocess_exec(
            *python("-c", _BOOT, str(os.getpid()), *sys.path),
            stdin=PIPE,
            stdout=PIPE,
            # Iterating over a set follows the hash seed, and rows of some data sets follow that.
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        maker = cls(setup, ChildProcess(process), limit_s=limit_s, on_rows=on_rows)
        try:
            await maker._open(setup)
        except BaseException:
            await maker.close()
            raise
        return maker

    @property
    def making(self) -> int | None:
        """The row that is being made."""
        return next(iter(self._asked), None)

    def want(self, numbers: Iterable[int]) -> None:
        """Have these rows made in this order, and forget all others."""
        known, loop = self._rows, asyncio.get_running_loop()
        self._rows = {number: known.get(number) or loop.create_future() for number in numbers}
        if self._down is not None:
            self._fail_all(self._down)
        missing = [number for number, row in self._rows.items() if not row.done() and number not in self._asked]
        if not missing or self._process.stdin is None or self._process.stdin.is_closing():
            return  # callers that await `run` get the error that the process ended
        if not self._asked:
            self._ticks = 0
        self._asked.update(dict.fromkeys(missing))
        self._process.stdin.write(pack(RowsWanted(missing)))
        if self._timer is None:
            self._timer = loop.call_later(self._limit_s / _TICKS, self._tick)

    def get(self, number: int) -> PromptRow | None:
        """A wanted row, if it is made.

        Raises:
            DataError: it cannot be made, or takes too long.
            RowMakerDown: the process ended.
        """
        row = self._rows.get(number)
        return row.result() if row is not None and row.done() else None

    async def row(self, number: int) -> PromptRow:
        """A wanted row, once it is made.

        Raises:
            DataError: it cannot be made, or takes too long.
            RowMakerDown: the process ended.
        """
        return await asyncio.shield(self._rows[number])

    async def run(self) -> None:
        """Take rows in as they are made, until this is closed or a row takes too long.

        Raises:
            RowMakerDown: the process ended by itself.
        """
        while frames := await self._next():
            for frame in frames:
                self._take(_made.decode(frame))
            self._on_rows()
        if self._ticks > _TICKS and self.making in self._rows:
            hint = f"within task.row_limit_s = {self._limit_s:g}; raise it, or change the options of the data"
            error = await self._ended(f"row {self.making} was made, and took too long")
            self._fail(self.making, self._fault(self.making, f"was not made {hint}"))
            self._fail_all(error)
            self._on_rows()
        elif not self._closed:
            error = await self._ended(f"row {self.making} was made" if self._asked else "nothing was asked of it")
            self._fail_all(error)
            raise error

    async def close(self) -> None:
        """End the process."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._kill()
        await self._process.wait()

    async def _open(self, setup: RowSetup) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(pack(setup))
        try:
            async with asyncio.timeout(_OPEN_LIMIT_S):
                frames = await self._next()
        except TimeoutError:
            raise DataError(f"data {self._spec!r}: not open within {_OPEN_LIMIT_S:g} s") from None
        if not frames:
            raise await self._ended("the data was opened")
        self.opened = msgspec.msgpack.decode(frames[0], type=Opened)
        if self.opened.error:
            raise DataError(self.opened.error)

    async def _next(self) -> list[bytes]:
        """The next frames, at least one; none when the process has ended."""
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(_READ_BYTES):
            if frames := list(self._frames.feed(data)):
                return frames
        return []

    def _take(self, made: RowMade) -> None:
        self._asked.pop(made.number, None)
        self._ticks = 0
        row = self._rows.get(made.number)
        if made.row is None:
            self._fail(made.number, self._fault(made.number, f"cannot be made: {made.error}"))
        elif row is not None and not row.done():
            row.set_result(made.row)

    def _fault(self, number: int, words: str) -> DataError:
        return DataError(f"data {self._spec!r}: row {number} {words}")

    def _fail(self, number: int, error: Exception) -> None:
        """Fail a row: its callers get the error; the rows before it are served."""
        row = self._rows.get(number)
        if row is not None and not row.done():
            row.set_exception(error)
            row.exception()  # requested once: a row that is not needed is no fault

    def _fail_all(self, error: Exception) -> None:
        """Fail all rows that are not made: another process may make them."""
        self._down = error
        for number in self._rows:
            self._fail(number, error)

    async def _ended(self, during: str) -> RowMakerDown:
        code = await self._process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return RowMakerDown(f"the process that makes rows of {self._spec!r} ended while {during}: {how}")

    def _tick(self) -> None:
        """End the process once its row has taken all its time."""
        self._timer = None
        if not self._asked:
            return
        self._ticks += 1
        if self._ticks > _TICKS:
            self._kill()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._limit_s / _TICKS, self._tick)

    def _kill(self) -> None:
        if self._child.returncode is None:
            self._child.kill_group()


async def sample_rows(
    setup: RowSetup, count: int, within_s: float, *, limit_s: float
) -> tuple[Opened, list[PromptRow]]:
    """Open data, and read its first and its longest rows: at least one, and no more than can be made in some seconds.

    Args:
        count: of the first rows; of the longest there are `setup.longest`.
        limit_s: seconds that one row may take.

    Raises:
        DataError: the data cannot serve, or the first row cannot be made.
        RowMakerDown: the process ended.
    """
    maker = await RowMaker.open(setup, limit_s=limit_s)
    following = asyncio.create_task(maker.run())
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
        await asyncio.gather(following, return_exceptions=True)
