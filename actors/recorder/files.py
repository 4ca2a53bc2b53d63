"""The recorder's metrics file, and beside it how far the logs are in it: a later start goes on from there.

Rows are appended first, then the position is replaced atomically. If the process is killed between the two, the next
start truncates the file to the recorded size and makes the rows behind it again.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from actors.recorder.fold import RecorderState, StepRow
from actors.runtime.snapshots import format_of


class Recorded(msgspec.Struct):
    """The state at a known size of the metrics file."""

    format: str  # of the state: that of another version of this program is of no use
    positions: dict[str, int]  # sequence of the newest message folded, by the name of the stream
    rows_bytes: int
    state: RecorderState


class MetricsFile:
    """`metrics.jsonl` of a run."""

    def __init__(self, root: Path) -> None:
        self.path = root / "metrics.jsonl"
        self._recorded = root / "recorder.json"

    def read(self) -> Recorded | None:
        """Return the record stored last; None where there is none, or it cannot be continued."""
        try:
            found = msgspec.json.decode(self._recorded.read_bytes(), type=Recorded)
            whole = found.format == format_of(RecorderState) and self.path.stat().st_size >= found.rows_bytes
        except (OSError, msgspec.MsgspecError):
            return None
        return found if whole else None

    def begin(self, recorded: Recorded | None) -> None:
        """Go on from what was stored, or anew: whatever else the file holds is made again."""
        with self.path.open("ab") as file:
            file.truncate(recorded.rows_bytes if recorded is not None else 0)

    def append(self, rows: list[dict[str, object]]) -> None:
        """Write rows at the end."""
        with self.path.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))

    def store(self, positions: dict[str, int], state: RecorderState) -> None:
        """Store how far the rows in the file go."""
        with self.path.open("ab") as file:
            os.fsync(file.fileno())
            recorded = Recorded(format_of(RecorderState), positions, file.tell(), state)
        new = self._recorded.with_suffix(".new")
        with new.open("wb") as file:
            file.write(msgspec.json.encode(recorded))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._recorded)

    def steps(self) -> list[StepRow]:
        """The rows of RL steps."""
        decoder = msgspec.json.Decoder(StepRow)
        with self.path.open("rb") as file:
            rows = map(decoder.decode, file)
            return [row for row in rows if row.event == "step" and row.stage == "rl"]
