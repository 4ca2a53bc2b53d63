"""Fetching the tokens of a batch: its members name them by sequence and digest."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import xxhash

from actors.runtime.actor import ActorFault
from asyncrl.algorithms.batches import GradedGroup, GradedTrajectory
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_message
from asyncrl.bus.publish import BlobMissing, body_of
from asyncrl.bus.sealing import open_body
from asyncrl.bus.vault import SecretGone
from topics.batches import BatchMember, BatchPacked
from topics.topic import TRAJECTORIES
from topics.trajectories import TRAJECTORY_GENERATED, TrajectoryGenerated
from topics.wire import WireError, decode

_AT_ONCE = 64  # payloads asked for at once
_SHOWN = 3  # doubles that an error names


class PayloadGone(ActorFault):
    """Tokens of a batch that are not stored any more."""


async def fetch_trajectories(
    bus: Bus, packed: BatchPacked, rank: int = 0, owners: Sequence[int] | None = None
) -> list[GradedGroup]:
    """The groups of a batch, in the order it names them; of a member that was purged since, the counts alone are known.

    Args:
        rank: number of the rank whose share of the batch is fetched; of all others only the counts are known.
        owners: the rank of each trajectory, in the order the batch names them; this one has all where left out.

    Raises:
        PayloadGone: tokens are trimmed.
        ActorFault: tokens are not those that were graded.
    """
    _check_doubles(packed)
    limit = asyncio.Semaphore(_AT_ONCE)

    async def fetch(member: BatchMember, owner: int) -> GradedTrajectory:
        elsewhere = GradedTrajectory(
            member.trajectory_id, (), member.reward, member.tokens, turn_rewards=member.turn_rewards
        )
        if owner != rank:
            return elsewhere
        async with limit:
            try:
                payload = await _payload(bus, packed.step, member)
            except SecretGone:  # as if another rank had it: what is purged has no gradient, and changes no other's
                return elsewhere
        return GradedTrajectory(member.trajectory_id, payload.segments, member.reward, turn_rewards=member.turn_rewards)

    named = [member for group in packed.groups for member in group.members]
    fetched = iter(await asyncio.gather(*map(fetch, named, owners or [rank] * len(named))))
    return [
        GradedGroup([next(fetched) for _ in group.members], group.estimator, group.temperature)
        for group in packed.groups
    ]


async def _payload(bus: Bus, step: int, member: BatchMember) -> TrajectoryGenerated:
    record = await read_message(bus, TRAJECTORIES, member.payload.sequence)
    if record is None:
        raise PayloadGone(
            f"batch {step}: the tokens of {member.trajectory_id} (message {member.payload.sequence}) are gone"
        )
    try:
        body = await body_of(bus, record)
    except BlobMissing as error:
        raise PayloadGone(f"batch {step}: the tokens of {member.trajectory_id}: {error}") from error
    except WireError as error:
        raise ActorFault(f"batch {step}: the tokens of {member.trajectory_id}: {error}") from error
    digest = xxhash.xxh3_64_hexdigest(body)
    if digest != member.payload.digest:
        raise ActorFault(
            f"batch {step}: the tokens of {member.trajectory_id} have digest {digest}, "
            f"{member.payload.digest} was graded"
        )
    payload = decode(TrajectoryGenerated, await open_body(bus, TRAJECTORY_GENERATED, record, body))
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
