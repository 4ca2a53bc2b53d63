"""Ends of trajectories and groups, as a rollout worker knows them."""

from __future__ import annotations

import contextlib

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last_of_each
from asyncrl.bus.publish import unpack
from topics.groups import GROUP_DROPPED, GroupDropped
from topics.prompts import PromptIssued
from topics.topic import BATCHES
from topics.trajectories import TRAJECTORY_DROPPED, TrajectoryDropped
from topics.wire import WireError

EVERY = 1 << 31  # more than any attempt: a group ends with all of them
_MOST = 16_384  # ends that are kept; the log has the others


class EndedCache:
    """The newest ends that came while this worker listened: its memory does not grow with the run."""

    def __init__(self, most: int = _MOST) -> None:
        self._known: dict[str, tuple[int, int]] = {}  # newest attempt that has ended, and when; the newest last
        self._most = most
        self._forgotten_ns = -1  # when the newest of the ends that were evicted was stored

    def add(self, message: GroupDropped | TrajectoryDropped, time_ns: int) -> None:
        """Note an end, and the time of the server's clock at which it was stored."""
        if isinstance(message, GroupDropped):
            key, attempt = message.prompt_id, EVERY
        else:
            key, attempt = message.trajectory_id, message.attempt
        before, _ = self._known.pop(key, (-1, 0))
        self._known[key] = (max(attempt, before), time_ns)
        if len(self._known) > self._most:
            _, forgotten_ns = self._known.pop(next(iter(self._known)))
            self._forgotten_ns = max(self._forgotten_ns, forgotten_ns)

    def include(self, issued: PromptIssued) -> bool:
        """Return whether this attempt has ended, as far as is known here."""
        own, _ = self._known.get(issued.trajectory_id, (-1, 0))
        of_group, _ = self._known.get(issued.prompt_id, (-1, 0))
        return issued.attempt <= max(own, of_group)

    def may_be_incomplete(self, issued_ns: int) -> bool:
        """Return whether an end may be only on the log, for work that was issued at that time of the server's clock."""
        return issued_ns <= self._forgotten_ns

    async def look_up(self, bus: Bus, issued: PromptIssued) -> bool:
        """Return whether the log has an end of this attempt."""
        subjects = [
            TRAJECTORY_DROPPED.subject(bus.run, issued.trajectory_id),
            GROUP_DROPPED.subject(bus.run, issued.prompt_id),
        ]
        found = EndedCache()
        for record in await read_last_of_each(bus, BATCHES, subjects):
            with contextlib.suppress(WireError):  # the recorder of the log keeps it as a dead letter
                found.add(unpack(record, record.data)[1], record.time_ns)
        return found.include(issued)
