"""The recorder's samples: a few texts of each batch and evaluation, read before their tokens are trimmed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import chain, islice, zip_longest
from typing import Any

from actors.runtime.actor import Context
from asyncrl.bus.log import last_sequence, read_next, stream_info
from asyncrl.bus.publish import BlobMissing, read
from asyncrl.bus.vault import SecretGone
from asyncrl.state.samples import Event, Sample, SampleReader, SampleRow, SamplesFile, seal_sample
from topics.batches import BATCH_PACKED, BatchMember, BatchPacked
from topics.evals import EVAL_SCORED
from topics.topic import TRAJECTORIES, Topic
from topics.wire import WireError

_MB = 1_000_000
_TOPICS: dict[Event, Topic[Any]] = {"step": BATCH_PACKED, "eval": EVAL_SCORED}


class Sampler:
    """Reads batches and evaluations one after the other, from where the samples file ends."""

    def __init__(self, context: Context) -> None:
        settings, self._bus = context.config.recorder, context.bus
        self._count = settings.samples
        self._file = SamplesFile(context.files.root, settings.samples_mb * _MB)
        self._reader = SampleReader(context.bus, context.files.model_path(context.config.model))
        self._after: dict[Event, int] = {}  # sequence of the newest message that was read
        self._first = 0  # sequence of the oldest result that was stored at the start

    async def begin(self) -> None:
        """Take up where the file ends; anew where it is of other logs."""
        if self._count:
            self._first = int((await stream_info(self._bus, TRAJECTORIES))["state"]["first_seq"])
            self._after = self._file.begin()
            ends = {event: await last_sequence(self._bus, topic.stream) for event, topic in _TOPICS.items()}
            if any(self._after[event] > end for event, end in ends.items()):
                self._file.path.unlink()
                self._after = self._file.begin()

    async def write(self) -> None:
        """Append samples of everything that was stored since."""
        for event, topic in _TOPICS.items() if self._count else ():
            async for sequence, message in self._since(event, topic):
                if isinstance(message, BatchPacked):
                    step, groups = message.step, [group.members for group in message.groups]
                else:
                    step, groups = message.version, [message.members]
                if samples := await self._of(groups):
                    self._file.append(SampleRow(event, step, sequence, samples))

    async def _since(self, event: Event, topic: Topic[Any]) -> AsyncIterator[tuple[int, Any]]:
        subject = topic.subject(self._bus.run)
        while (record := await read_next(self._bus, topic.stream, subject, self._after[event] + 1)) is not None:
            self._after[event] = record.sequence
            try:
                message = await read(self._bus, topic.message, record)
            except (WireError, BlobMissing):
                continue  # the log's readers keep it as a dead letter
            yield record.sequence, message

    async def _of(self, groups: list[list[BatchMember]]) -> list[Sample]:
        """One member of each of the first groups, of all groups a second one, and so on."""
        members = chain.from_iterable(zip_longest(*groups))
        found = []
        for member in islice(filter(None, members), self._count):
            if member.payload.sequence < self._first:
                continue  # it was trimmed long ago
            sample = await self._reader.read(member.trajectory_id, member.payload.sequence)
            if sample is not None:
                sample.reward = member.reward
                with suppress(SecretGone):  # purged since it was read
                    found.append(await seal_sample(self._bus, sample))
        return found
