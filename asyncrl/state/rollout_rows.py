"""The completions of a run without a learner, as rows of a Parquet file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import read, read_result
from asyncrl.errors import AsyncRLError
from topics.batches import BATCH_PACKED, BatchMember, BatchPacked
from topics.topic import BATCHES


async def write_rollouts(bus: Bus, output: Path, batches: int, report: Callable[[int], None]) -> None:
    """Write a row for each trajectory of the next batches of a run, as they are packed.

    The columns `tokens`, `mask`, `logprobs` and `versions` hold a list for each segment. Prompts, labels and metadata
    that are no text are JSON.

    Args:
        output: appears once it is whole.
        batches: after which the file is closed.
        report: is called with the number of prompts so far.

    Raises:
        AsyncRLError: the file cannot be written.
    """
    import pyarrow
    import pyarrow.parquet

    packed: asyncio.Queue[Record] = asyncio.Queue()
    reader = LogReader(bus, BATCHES, packed.put_nowait, subjects=[BATCH_PACKED.pattern(bus.run)])
    aside, prompts = output.with_name(f".{output.name}.partial"), 0
    try:
        await reader.start()
        with pyarrow.parquet.ParquetWriter(aside, _schema(pyarrow)) as file:
            for _ in range(batches):
                batch = await read(bus, BatchPacked, await packed.get())
                rows = [await _row(bus, group.prompt_id, one) for group in batch.groups for one in group.members]
                file.write_table(pyarrow.Table.from_pylist(rows, schema=_schema(pyarrow)))
                prompts += len(batch.new_groups)
                report(prompts)
        aside.replace(output)
    except OSError as error:
        raise AsyncRLError(f"{output} cannot be written: {error}") from error
    finally:
        aside.unlink(missing_ok=True)
        await reader.close()


def _schema(arrow: Any) -> Any:
    texts = ("prompt_id", "trajectory_id", "prompt", "label", "metadata", "completion")
    arrays = {"tokens": arrow.int32(), "mask": arrow.uint8(), "logprobs": arrow.float32(), "versions": arrow.int32()}
    return arrow.schema(
        [
            *((name, arrow.string()) for name in texts),
            ("reward", arrow.float64()),
            ("truncated", arrow.bool_()),
            *((name, arrow.list_(arrow.list_(kind))) for name, kind in arrays.items()),
        ]
    )


async def _row(bus: Bus, prompt_id: str, member: BatchMember) -> dict[str, Any]:
    try:
        generated = await read_result(bus, member.payload)
    except BlobMissing as error:
        raise AsyncRLError(f"{member.trajectory_id}: {error}; start again with a larger nats.stream_max_mb") from error
    row = generated.rows[0]
    arrays = ("tokens", "mask", "logprobs", "versions")
    return {
        "prompt_id": prompt_id,
        "trajectory_id": member.trajectory_id,
        "prompt": _text(row.prompt),
        "label": _text(row.label),
        "metadata": _text(row.metadata),
        "completion": generated.completion,
        "reward": member.reward,
        "truncated": generated.truncated,
        **{name: [getattr(segment, name) for segment in generated.segments] for name in arrays},
    }


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()
