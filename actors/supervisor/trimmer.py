"""The trimmer, a part of the supervisor: keeps payload streams, weights and checkpoints within their bounds.

Its effects come one after the other, and a crash between any two is harmless:
1. Blobs go before the messages that name them. Blobs that remain below the floor are found and purged again.
2. A purge is announced before it begins (`stream.trimming`), and counted after it (`stream.trimmed`): a reader that
   finds a message gone knows why.
3. Directories are renamed aside before they are removed. The next pruning removes renamed directories that remain.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import Any, NamedTuple

from actors.runtime.actor import Context
from actors.runtime.keeper import Keeper
from actors.supervisor.sweeper import Sweeper, purge, purge_blobs, purge_versions
from actors.supervisor.trimmer_fold import Kept, Needless, TrimmerFold
from asyncrl.background import first_of
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record, read_last, read_last_of_each, retry_until_deadline, stream_info
from asyncrl.bus.provision import queue_info
from asyncrl.config.stream_capacity import CHECKPOINT_SHARE, PAUSE_SHARE, TRIM_SHARE
from asyncrl.crash import crash_point
from asyncrl.training.checkpoint import prune_checkpoints
from asyncrl.weights.files.store import FileStore
from topics.batches import BATCH_PACKED
from topics.prompts import PROMPT_ISSUED
from topics.streams import AdmissionPaused, AdmissionResumed, CheckpointRequested, StreamTrimmed, StreamTrimming
from topics.topic import BLOBS, PROMPTS, TRAJECTORIES, Stream, Topic
from topics.trajectories import PROGRESS_STORED, TRAJECTORY_GENERATED, TRAJECTORY_PROGRESSED
from topics.wire import Headers, Message

_POLL_S = 1.0  # between two looks at the streams' sizes, which nothing announces
_TRIM_S = 5.0  # between two trims without a new checkpoint
_NEWS_S = 30.0  # for this process to read a log up to its present end
_NAMES_AT_ONCE = 256  # in one question; the server takes no more than 1024


class _Fill(NamedTuple):
    """The fill level of a payload stream."""

    name: str
    bytes: int
    most: int
    first: int  # sequence of the oldest message
    last: int  # of the newest, or before

    @property
    def share(self) -> float:
        return self.bytes / self.most if self.most > 0 else 0.0

    def __str__(self) -> str:
        return f"{self.name} holds {self.bytes / 1e6:.1f} of {self.most / 1e6:.0f} MB"


class Trimmer:
    """Examines the streams once a second, and purges what the logs show to be needless."""

    def __init__(self, context: Context, keeper: Keeper, fold: TrimmerFold) -> None:
        self.fold = fold  # that this keeper folds them into
        self._context = context
        self._bus = context.bus
        self._keeper = keeper  # of the supervisor's own log, with the trimmer's inputs among its own
        self._trims = context.config.nats.keep == "checkpoint"
        self._store = FileStore(context.files.weights)
        self._sweeper = Sweeper(context)
        self._received = asyncio.Event()
        self._trimmed_at = 0.0
        self._trimmed_for = context.config.origin  # oldest kept checkpoint at the last trim
        self._pruned: tuple[Kept | None, Kept | None] = (None, None)
        self._ended = asyncio.Event()
        subjects = [topic.pattern(self._bus.run) for topic in fold.inputs()[TRAJECTORIES].topics]
        self._stored = Listener(self._bus, TRAJECTORIES, self._take, self._refuse, subjects=subjects, headers_only=True)

    async def run(self) -> None:
        """Read the payload stream, then check the streams until `end`, and prune weights and checkpoints at the end."""
        try:
            if self._trims:
                await self._stored.start()
                await self._stored.caught_up()
            while not self._ended.is_set():
                await self._look()
                await first_of(self._ended.wait(), timeout_s=_POLL_S)
            await self._prune()
        finally:
            await self._stored.close()

    def end(self) -> None:
        """Let `run` return."""
        self._ended.set()

    def _take(self, topic: Topic[Message], message: Message | Headers, record: Record) -> None:
        self._received.set()
        self.fold.apply(topic, message, record)

    def _refuse(self, record: Record, _error: Exception) -> None:
        """Ignore it: its consumers reject it; here it only counts towards the size of the stream."""
        self._received.set()
        with contextlib.suppress(LookupError, ValueError):  # no name, or no blob: it goes in its turn
            self.fold.note(record)

    async def _look(self) -> None:
        fills = await self._fills()
        share = max(fill.share for fill in fills)
        due = self.fold.kept_step > self._trimmed_for
        waited = time.monotonic() > self._trimmed_at + _TRIM_S
        if self._trims and (due or (share > TRIM_SHARE and waited)):
            await self._trim(pressed=share > TRIM_SHARE, full=share > PAUSE_SHARE)
            fills = await self._fills()
        await self._press(max(fills, key=lambda fill: fill.share))
        await self._sweeper.sweep()
        await self._prune()

    async def _trim(self, *, pressed: bool, full: bool) -> None:
        """Purge needless messages; if the streams are `pressed`, also those between needed messages."""
        self._trimmed_at = time.monotonic()
        kept_step, end = self.fold.kept_step, await self._end()
        if end is None:
            return
        self._trimmed_for = kept_step
        if pressed:
            self.fold.disown(await self._strangers())
        before = await self._fills()
        contained = await self._contained() if full else self.fold.kept_step
        gone = self.fold.needless(end, contained, pressed=pressed)
        if gone.below <= before[0].first and not (gone.logs or gone.ended):
            return
        await self._keeper.append_until_stored([StreamTrimming(TRAJECTORIES.name, gone.below, gone.ended)])
        crash_point("trim.announced")
        chunks = await purge_blobs(self._bus, BLOBS, gone.blobs)
        crash_point("trim.blobs_purged")
        messages = await self._purge_messages(gone)
        crash_point("trim.purged")
        self.fold.forget(gone)
        after = await self._fills()
        freed = sum(fill.bytes for fill in before) - sum(fill.bytes for fill in after)
        message = StreamTrimmed(TRAJECTORIES.name, gone.below, messages, max(0, freed), chunks)
        self._context.log.info("stream trimmed", below=gone.below, messages=messages, chunks=chunks, bytes=freed)
        await self._keeper.append_until_stored([message])

    async def _end(self) -> int | None:
        """The sequence below which everything was folded and nothing waits for a reward; None if that does not come."""
        fill = await self._fill(TRAJECTORIES)
        try:
            async with asyncio.timeout(_NEWS_S):
                while fill.first <= fill.last > self._stored.last:
                    self._received.clear()
                    await self._received.wait()
        except TimeoutError:
            self._context.log.warning("not trimmed: the stream has not arrived", last=fill.last)
            return None
        ends = [fill.last]
        for queue in self._bus.tables.queues_of("reward"):
            info = await retry_until_deadline(self._bus, partial(queue_info, self._bus, queue))
            if info["num_pending"] or info["num_ack_pending"]:
                ends.append(int(info["ack_floor"]["stream_seq"]))
        return min(ends) + 1

    async def _contained(self) -> int:
        """The step up to which batches are needed no more in a stream in which open work has no room left.

        The newest checkpoint alone counts once it contains every batch: there is no next batch, hence no next
        checkpoint, and nothing else would ever make room.
        """
        saved = self.fold.saved_step
        if saved > self.fold.kept_step:
            newest = await read_last(self._bus, BATCH_PACKED)
            with contextlib.suppress(LookupError, ValueError):  # no batch of ours: nothing is known of the newest
                if newest is not None and int(newest.headers["step"]) <= saved:
                    return saved
        return self.fold.kept_step

    async def _strangers(self) -> set[str]:
        """Trajectories with stored messages that were never issued."""
        strangers = set(self.fold.open)
        names = sorted(strangers)
        for start in range(0, len(names), _NAMES_AT_ONCE):
            some, of_name = names[start : start + _NAMES_AT_ONCE], partial(self._bus.tables.subjects, PROMPT_ISSUED)
            subjects = [subject for name in some for subject in of_name(self._bus.run, name)]
            found = await read_last_of_each(self._bus, PROMPTS, subjects)
            strangers -= {record.key for record in found}
        return strangers

    async def _purge_messages(self, gone: Needless) -> int:
        """Purge messages; returns how many."""
        run = self._bus.run
        some = [(PROGRESS_STORED.subject(run, log), below) for log, below in gone.logs.items()]
        for name, end in gone.ended.items():
            for topic in (TRAJECTORY_PROGRESSED, TRAJECTORY_GENERATED):
                some += [(subject, end) for subject in self._bus.tables.subjects(topic, run, name)]
        wanted: list[dict[str, Any]] = [{"filter": subject, "seq": end} for subject, end in some]
        return await purge(self._bus, TRAJECTORIES, [{"seq": gone.below}, *wanted])

    async def _press(self, fullest: _Fill) -> None:
        """Ask for a checkpoint, stop and resume admission, as the fullest stream demands."""
        saved = self.fold.saved_step
        if self._trims and fullest.share > CHECKPOINT_SHARE and self.fold.state.asked_after < saved:
            await self._keeper.append_until_stored([CheckpointRequested(saved, str(fullest))])
        if fullest.share > PAUSE_SHARE and not self.fold.state.paused:
            await self._keeper.append_until_stored([AdmissionPaused(str(fullest))])
        elif fullest.share <= PAUSE_SHARE and self.fold.state.paused:
            await self._keeper.append_until_stored([AdmissionResumed(str(fullest))])

    async def _prune(self) -> None:
        """Remove old weights and checkpoints, where the logs have news about them."""
        kept = self.fold.versions(), self.fold.checkpoints()
        versions, checkpoints = kept
        if kept == self._pruned:
            return
        removed = 0
        if versions is not None:
            removed += await asyncio.to_thread(self._store.prune, versions.names, versions.newest)
            removed += await purge_versions(self._bus, versions.names, versions.newest)
        if checkpoints is not None:
            root = self._context.files.checkpoints
            removed += await asyncio.to_thread(prune_checkpoints, root, checkpoints.names, checkpoints.newest)
        self._pruned = kept
        self._context.count("pruned", removed)

    async def _fill(self, stream: Stream) -> _Fill:
        info = await stream_info(self._bus, stream)
        state, most = info["state"], info["config"]["max_bytes"]
        return _Fill(stream.name, state["bytes"], most, state["first_seq"], state["last_seq"])

    async def _fills(self) -> list[_Fill]:
        return [await self._fill(stream) for stream in (TRAJECTORIES, BLOBS)]
