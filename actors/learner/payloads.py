"""Fetching the tokens of a batch: its members name them by sequence and digest."""

from __future__ import annotations

import asyncio
from collections import Counter

import xxhash

from actors.runtime.actor import ActorFault
from asyncrl.algorithms.batches import GradedGroup, GradedTrajectory
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_message
from asyncrl.bus.publish import BlobMissing, body_of
from asyncrl.training.ranks import shares
from topics.batches import BatchMember, BatchPacked
from topics.topic import TRAJECTORIES
from topics.trajectories import TrajectoryGenerated
from topics.wire import WireError, decode, prepare

_AT_ONCE = 64  # payloads asked for at once
_SHOWN = 3  # doubles that an error names


class Payloads:
    """The trajectories of batches, fetched as soon as a batch is known."""

    def __init__(self, bus: Bus, rank: int = 0, ranks: int = 1) -> None:
        """
        Args:
            rank: number of the rank whose share of a batch is fetched; of all others only the counts are known.
            ranks: how many there are.
        """
        self._share = rank, ranks
        self._bus = bus
        prepare(TrajectoryGenerated)
        self._fetches: dict[int, asyncio.Task[list[GradedGroup]]] = {}

    def begin(self, packed: BatchPacked) -> None:
        """Start to fetch a batch, unless that has begun."""
        if packed.step not in self._fetches:
            self._fetches[packed.step] = asyncio.create_task(self._fetch(packed))

    async def take(self, packed: BatchPacked) -> list[GradedGroup]:
        """The groups of a batch, in the order it names them.

        Raises:
            ActorFault: tokens are gone, or are not those that were graded.
        """
        self.begin(packed)
        return await self._fetches.pop(packed.step)

    async def _fetch(self, packed: BatchPacked) -> list[GradedGroup]:
        _check_doubles(packed)
        limit = asyncio.Semaphore(_AT_ONCE)

        async def fetch(member: BatchMember) -> GradedTrajectory:
            async with limit:
                payload = await self._payload(packed.step, member)
            return GradedTrajectory(member.trajectory_id, payload.segments, member.reward)

        async def counted(member: BatchMember) -> GradedTrajectory:
            return GradedTrajectory(member.trajectory_id, (), member.reward, member.tokens)

        rank, ranks = self._share
        named = [member for group in packed.groups for member in group.members]
        owners = shares([member.tokens for member in named], ranks)
        fetches = [
            fetch(member) if owner == rank else counted(member) for member, owner in zip(named, owners, strict=True)
        ]
        fetched = iter(await asyncio.gather(*fetches))
        return [
            GradedGroup([next(fetched) for _ in group.members], group.estimator, group.temperature)
            for group in packed.groups
        ]

    async def _payload(self, step: int, member: BatchMember) -> TrajectoryGenerated:
        record = await read_message(self._bus, TRAJECTORIES, member.payload.sequence)
        if record is None:
            raise ActorFault(
                f"batch {step}: the tokens of {member.trajectory_id} (message {member.payload.sequence}) are gone"
            )
        try:
            body = await body_of(self._bus, record)
        except (BlobMissing, WireError) as error:
            raise ActorFault(f"batch {step}: the tokens of {member.trajectory_id}: {error}") from error
        digest = xxhash.xxh3_64_hexdigest(body)
        if digest != member.payload.digest:
            raise ActorFault(
                f"batch {step}: the tokens of {member.trajectory_id} have digest {digest}, "
                f"{member.payload.digest} was graded"
            )
        payload = decode(TrajectoryGenerated, body)
        if (payload.trajectory_id, payload.attempt) != (member.trajectory_id, member.attempt):
            raise ActorFault(
                f"batch {step}: message {member.payload.sequence} holds {payload.trajectory_id} (attempt "
                f"{payload.attempt}), and the batch names it as {member.trajectory_id} (attempt {member.attempt})"
            )
        return payload


def _check_doubles(packed: BatchPacked) -> None:
    """Refuse a batch that would train a trajectory or its tokens twice.

    Raises:
        ActorFault: it would.
    """
    members = [member for group in packed.groups for member in group.members]
    names = Counter(member.trajectory_id for member in members)
    messages = Counter(member.payload.sequence for member in members)
    found = [f"{name} is {count} of its members" for name, count in names.items() if count > 1]
    found += [f"message {at} holds the tokens of {count} members" for at, count in messages.items() if count > 1]
    if found:
        raise ActorFault(f"batch {packed.step}: {'; '.join(found[:_SHOWN])}; a batch trains every trajectory once")
