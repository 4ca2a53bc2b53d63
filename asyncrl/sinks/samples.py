"""New rows of `samples.jsonl`, which the recorder appends to and replaces by a shorter file when it is full."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from asyncrl.sinks.sink import SamplesRow

_DECODER = msgspec.json.Decoder(SamplesRow)


class SamplesTail:
    """Reads rows that were not read before."""

    def __init__(self, path: Path) -> None:
        self.newest: dict[str, int] = {}  # sequence of the newest row that was read, by event
        self._path = path
        self._file = (0, 0)  # number of the file that was read, and the byte up to which it was

    def read(self) -> list[SamplesRow]:
        """Return whole rows that are new, without samples whose texts are encrypted."""
        try:
            with self._path.open("rb") as file:
                number = os.fstat(file.fileno()).st_ino
                file.seek(self._file[1] if self._file[0] == number else 0)
                begun = file.tell()
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._file = (number, begun + len(whole))
        found = []
        for line in whole.splitlines():
            with contextlib.suppress(msgspec.MsgspecError):  # of another version
                row = _DECODER.decode(line)
                if row.sequence > self.newest.get(row.event, 0):
                    self.newest[row.event] = row.sequence
                    row.samples = [sample for sample in row.samples if not sample.get("sealed")]
                    found.append(row)
        return found
