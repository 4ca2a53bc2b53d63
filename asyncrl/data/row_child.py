"""The process that makes rows of a data source: making them takes Python's lock, and may take seconds a row."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import msgspec

from asyncrl.data.protocol import DataError, DataSource
from asyncrl.data.row_frames import Opened, RowMade, RowSetup, RowsWanted
from asyncrl.data.sources import FileSource, open_source
from asyncrl.errors import last_lines
from asyncrl.framing import READ_BYTES, Frames, first_frame, pack, take_pipes
from asyncrl.process import die_with

_wanted = msgspec.msgpack.Decoder(RowsWanted)


def main(parent: int) -> None:
    """Make the rows that the parent asks for until it closes the pipe or dies."""
    die_with(parent)
    inbox, outbox = take_pipes()
    frames = Frames()
    setup = msgspec.msgpack.decode(first_frame(inbox, frames), type=RowSetup)
    try:
        source = open_source(
            setup.spec, options=setup.options, seed=setup.seed, base=Path(setup.base), labels_for=setup.labels_for
        )
    except DataError as error:
        _send(outbox, Opened(error=str(error)))
        return
    except Exception as error:  # whatever a package raises when it is loaded
        _send(outbox, Opened(error=f"data {setup.spec!r} cannot be opened: {last_lines(error, skip=1)}"))
        return
    longest = source.longest(setup.longest) if isinstance(source, FileSource) else []
    _send(outbox, Opened(rows_per_epoch=source.rows_per_epoch, description=source.describe(), longest=longest))
    while data := os.read(inbox, READ_BYTES):
        for frame in frames.feed(data):
            _make(source, _wanted.decode(frame).numbers, outbox)


def _make(source: DataSource, numbers: list[int], outbox: BinaryIO) -> None:
    """Make rows; each is sent at once, since the next one may take long."""
    for number in numbers:
        try:
            made = RowMade(number, source.row(number))
        except Exception as error:  # whatever the data's own code raises is an answer
            made = RowMade(number, error=last_lines(error, skip=1))
        _send(outbox, made)


def _send(outbox: BinaryIO, message: Opened | RowMade) -> None:
    outbox.write(pack(message))
    outbox.flush()
