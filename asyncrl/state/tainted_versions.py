"""The versions of weights that learnt from data that is purged, as the logs that are kept for the whole run have it."""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.bus.connection import Bus
from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.bus.merged_reader import read_log
from asyncrl.live.tenant_keys import covers
from topics.batches import BatchPacked, BatchTrained
from topics.ids import prompt_of
from topics.prompts import PromptIssuedHeaders
from topics.topic import BATCHES, PROMPTS, TRAINING


class Learnt(NamedTuple):
    """The training that some data had."""

    trajectories: int  # that were trained
    steps: list[int]  # that trained them; step s makes version s


async def learnt_from(bus: Bus, owner: str, before: str) -> Learnt:
    """Look up trained turns of an owner, of days before a date, readable or not.

    Raises:
        BusGone: the server sends nothing more.
    """
    found = _Trained(owner, before)
    for stream in (PROMPTS, BATCHES, TRAINING):  # one after the other: an issue comes before its batch
        await read_log(bus, stream, found)
    steps = sorted(step for step, count in found.packed.items() if count and step in found.trained)
    return Learnt(sum(found.packed[step] for step in steps), steps)


class _Trained(Fold):
    def __init__(self, owner: str, before: str) -> None:
        self.packed: dict[int, int] = {}  # trajectories by step
        self.trained: set[int] = set()
        self._prompts: set[str] = set()  # of the owner
        self._owner, self._before = owner, before

    def _on_issued(self, headers: PromptIssuedHeaders, _record: Record) -> None:
        secrets = filter(None, headers.secrets.split(","))
        if any(covers(secret, self._owner, self._before) for secret in secrets):
            self._prompts.add(prompt_of(headers.trajectory_id))

    def _on_packed(self, message: BatchPacked, _record: Record) -> None:
        self.packed[message.step] = sum(group.prompt_id in self._prompts for group in message.groups)

    def _on_trained(self, message: BatchTrained, _record: Record) -> None:
        if not message.skipped:
            self.trained.add(message.step)
