"""The recorder: writes what happened for people. It reads the logs from their beginning."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from actors.actor import Context
from actors.recorder_fold import RecorderFold
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record, patiently, read_last_of_each
from asyncrl.telemetry.plot import draw_reward
from topics.actors import KEEPER_TOPICS, RUN_OPENED
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
        listeners = {stream: self._listener(stream) for stream in _LOGS}
        for listener in listeners.values():
            await listener.start()
        stop = asyncio.create_task(self.context.stop.wait())
        while not stop.done():
            self._news.clear()
            self._write_rows()
            news = asyncio.create_task(self._news.wait())
            await asyncio.wait({news, stop}, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
        for stream, listener in listeners.items():  # what was said before the end belongs to the summary
            await listener.close()
            await self._listener(stream).read(after=listener.last)
        self.fold.issued = await self._count_issued()
        self._write_rows()
        root = self.context.files.root
        summary = self.fold.summary(self.context.bus.run)
        summary["metrics"] = str(self._metrics)
        if self.context.cast.recorder.plot and self.fold.steps:
            summary["plot"] = str(root / "reward.png")
            await asyncio.to_thread(draw_reward, root / "reward.png", self.fold.steps)
        (root / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary)) + b"\n")

    def _listener(self, stream: Stream) -> Listener:
        unread = [topic.subject(self.context.bus.run) for topic in KEEPER_TOPICS]
        return self.context.listen(stream, self._take, _LOGS[stream], unread=unread)

    async def _count_issued(self) -> int:
        """Distinct trajectories of RL: the subjects of their log, less the keeper's own and the warm-up's."""
        bus, cast = self.context.bus, self.context.cast
        info = await patiently(bus, lambda: bus.api(f"STREAM.INFO.{PROMPTS.full_name(bus.run)}"))
        own = [f"asyncrl.{bus.run}.prompter.*"]
        keepers = len(await read_last_of_each(bus, PROMPTS, own))
        warmup = cast.warmup.steps * (cast.warmup.batch_rows // cast.warmup.rows_per_trajectory)
        return max(0, int(info["state"].get("num_subjects", 0)) - keepers - warmup)

    def _take(self, topic: Topic[Any], message: Any, record: Record) -> None:
        if message is not None:
            self.fold.apply(topic, message, record)
        if self.fold.rows:
            self._news.set()

    def _write_rows(self) -> None:
        rows, self.fold.rows = self.fold.rows, []
        if rows:
            with self._metrics.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
