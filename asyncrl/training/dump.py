"""A dumped batch: all of one optimiser step as plain files, which programs without asyncrl read as well.

`batch.json` holds the record of the batch with rewards and objective, what the run reported of its step, and a line for
each row; `rows.safetensors` the arrays of all rows end to end; `samples.jsonl` prompts and texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.batches import GradedGroup, build_rows
from asyncrl.algorithms.rows import TrainRow
from asyncrl.errors import UNREADABLE, AsyncRLError
from asyncrl.files import write_json, write_private
from asyncrl.weights.directories import written_aside
from topics.batches import BatchPacked, BatchTrained, Objective

_BATCH, _ROWS, _SAMPLES = "batch.json", "rows.safetensors", "samples.jsonl"
_ARRAYS = ("tokens", "mask", "logprobs", "versions", "advantages", "weights")


class DumpError(AsyncRLError):
    """A batch that cannot be dumped, or a dump that cannot be read."""


class RowRecord(msgspec.Struct):
    """One row of a dump: a segment of a trajectory."""

    trajectory_id: str
    segment: int  # of its trajectory, from 0
    reward: float
    temperature: float
    estimator: str
    start: int  # its first token in the arrays
    stop: int  # one past its last row


class _Record(msgspec.Struct):
    """The content of `batch.json`."""

    run: str
    batch: BatchPacked
    trained: BatchTrained | None  # what the run reported; None where the step was not trained
    rows: list[RowRecord]


class Dump(NamedTuple):
    """A batch in trained form."""

    run: str
    batch: BatchPacked
    trained: BatchTrained | None
    records: list[RowRecord]
    rows: list[TrainRow]  # as many

    @property
    def objective(self) -> Objective:
        """The objective of the step, which `Trainer.step` takes with the rows."""
        return self.batch.objective


def write_dump(
    directory: Path,
    run: str,
    step: tuple[BatchPacked, BatchTrained | None],
    groups: Sequence[GradedGroup],
    samples: Sequence[msgspec.Struct],
) -> None:
    """Write a batch into a new directory, whole or not at all.

    Args:
        step: the batch, and the report of its step.
        groups: of the batch, with all tokens.
        samples: of its trajectories.

    Raises:
        CheckpointError: the directory is there, or the disk refused it.
    """
    from safetensors.numpy import save_file

    packed, trained = step
    rows, _ = build_rows(groups, packed.objective, step=packed.step, min_version=packed.min_version)
    segments = [
        (member, number, segment)
        for group in groups
        for member in group.members
        for number, segment in enumerate(member.segments)
    ]
    stops = np.cumsum([len(row.tokens) for row in rows], dtype=np.int64).tolist()
    records = [
        RowRecord(member.id, number, member.reward, row.temperature, row.estimator, stop - len(row.tokens), stop)
        for (member, number, _), row, stop in zip(segments, rows, stops, strict=True)
    ]
    arrays = {name: np.concatenate([getattr(row, name) for row in rows]) for name in _ARRAYS if rows}
    if rows:
        arrays["sampled"] = np.concatenate([segment.mask for _, _, segment in segments])
    with written_aside(directory) as aside:
        aside.path.chmod(0o700)
        save_file(arrays, aside.path / _ROWS)
        (aside.path / _ROWS).chmod(0o600)
        lines = (msgspec.json.encode(sample) + b"\n" for sample in samples)
        write_private(aside.path / _SAMPLES, b"".join(lines))
        write_json(aside.path / _BATCH, _Record(run, packed, trained, records))


def load_dump(directory: str | Path) -> Dump:
    """Read what `asyncrl dump` wrote.

    Raises:
        DumpError: it is not there, or is no whole dump.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    directory = Path(directory)
    try:
        record = msgspec.json.decode((directory / _BATCH).read_bytes(), type=_Record)
        arrays = load_file(directory / _ROWS)
        rows = [_row(record.batch, one, arrays) for one in record.rows]
    except (OSError, KeyError, SafetensorError, *UNREADABLE) as error:
        raise DumpError(f"{directory}: {error}; expected a folder that `asyncrl dump` wrote") from error
    return Dump(record.run, record.batch, record.trained, record.rows, rows)


def _row(batch: BatchPacked, record: RowRecord, arrays: dict[str, npt.NDArray[Any]]) -> TrainRow:
    values: dict[str, Any] = {name: arrays[name][record.start : record.stop] for name in _ARRAYS}
    return TrainRow(
        record.trajectory_id, **values, temperature=record.temperature, step=batch.step, estimator=record.estimator
    )
