"""The recorder: writes what happened for people. It reads the logs from its own recorded positions."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from actors.actor import Context
from actors.recorder_fold import RecorderFold
from asyncrl.bus.log import LogReader, Record, patiently, read_last_of_each
from asyncrl.telemetry.plot import draw_reward
from topics.actors import KEEPER_TOPICS, RUN_OPENED
from topics.table import topic_of
from topics.topic import ACTORS, BATCHES, ENGINES, EVALS, GRADES, PROMPTS, TRAINING, Stream, Topic
from topics.trajectories import TRAJECTORY_FAILED

_LOGS: dict[Stream, tuple[Topic[Any], ...]] = {
    TRAINING: (),
    BATCHES: (),
    GRADES: (TRAJECTORY_FAILED,),  # grades come again in batches and drops
    EVALS: (),
    ENGINES: (),
    ACTORS: (RUN_OPENED,),
}


async def main(context: Context) -> None:
    """Play the recorder: rows while the run goes on, summary and plot when it ends."""
    recorder = Recorder(context)
    await recorder.run()


class Recorder:
    """Folds every log from its beginning, so that a restarted recorder writes the same files again."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.fold = RecorderFold()
        self._news = asyncio.Event()
        self._metrics: Path = context.files.root / "metrics.jsonl"
        self._metrics.unlink(missing_ok=True)

    async def run(self) -> None:
        """Follow until asked to stop, then write what the run amounts to."""
        readers = [self._reader(stream) for stream in _LOGS]
        for reader in readers:
            await reader.start()
        stop = asyncio.create_task(self.context.stop.wait())
        while not stop.done():
            self._news.clear()
            self._write_rows()
            news = asyncio.create_task(self._news.wait())
            await asyncio.wait({news, stop}, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
        await self._read_to_the_end(readers)
        for reader in readers:
            await reader.close()
        self.fold.issued = await self._count_issued()
        self._write_rows()
        root = self.context.files.root
        summary = self.fold.summary(self.context.bus.run)
        summary["metrics"] = str(self._metrics)
        if self.context.cast.recorder.plot and self.fold.steps:
            summary["plot"] = str(root / "reward.png")
            await asyncio.to_thread(draw_reward, root / "reward.png", self.fold.steps)
        (root / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary)) + b"\n")

    async def _read_to_the_end(self, readers: list[LogReader]) -> None:
        """What was said before the end belongs to the summary."""
        for stream, reader in zip(_LOGS, readers, strict=True):
            last = int((await self._state(stream))["last_seq"])
            if reader.last < last:
                final = self._reader(stream, after=reader.last)
                await reader.close()
                await final.start()
                async with asyncio.timeout(30):
                    await final.caught_up.wait()
                await final.close()
        await self.context.heeded()

    async def _state(self, stream: Stream) -> dict[str, Any]:
        bus = self.context.bus
        info = await patiently(bus, lambda: bus.api(f"STREAM.INFO.{stream.full_name(bus.run)}"))
        state: dict[str, Any] = info["state"]
        return state

    def _reader(self, stream: Stream, after: int = 0) -> LogReader:
        subjects = [topic.pattern(self.context.bus.run) for topic in _LOGS[stream]]
        return LogReader(self.context.bus, stream, self._on_record, after=after, subjects=subjects)

    async def _count_issued(self) -> int:
        """Distinct trajectories of RL: the subjects of their log, less the keeper's own and the warm-up's."""
        bus, cast = self.context.bus, self.context.cast
        state = await self._state(PROMPTS)
        own = [f"asyncrl.{bus.run}.prompter.*"]
        keepers = len(await read_last_of_each(bus, PROMPTS, own))
        warmup = cast.warmup.steps * (cast.warmup.batch_rows // cast.warmup.rows_per_trajectory)
        return max(0, int(state.get("num_subjects", 0)) - keepers - warmup)

    def _on_record(self, record: Record) -> None:
        if topic_of(record.subject) not in KEEPER_TOPICS:
            self.context.heed(record, partial(self._apply, record))

    def _apply(self, record: Record, topic: Topic[Any], message: Any) -> None:
        self.fold.apply(topic, message, record)
        if self.fold.rows:
            self._news.set()

    def _write_rows(self) -> None:
        rows, self.fold.rows = self.fold.rows, []
        if rows:
            with self._metrics.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
