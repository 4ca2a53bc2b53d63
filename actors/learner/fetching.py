"""Fetching what a batch names: its tokens, and the experts that they went to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import msgspec

from actors.runtime.actor import ActorFault
from asyncrl.algorithms.batches import GradedGroup, GradedTrajectory
from asyncrl.algorithms.rows import Routed
from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.log import read_message
from asyncrl.bus.publish import read, read_result
from asyncrl.bus.routing import Part, Whole, read_routing
from topics.batches import BatchMember, BatchPacked
from topics.topic import BATCHES
from topics.trajectories import TrajectoryGenerated
from topics.wire import WireError

_AT_ONCE = 64  # payloads asked for at once
_SHOWN = 3  # doubles that an error names
_WHOLE = Whole()


async def read_batch(bus: Bus, sequence: int) -> BatchPacked:
    """Read a batch by its sequence in the batch log.

    Raises:
        ActorFault: it is gone, or cannot be read.
    """
    record = await read_message(bus, BATCHES, sequence)
    if record is None:
        raise ActorFault(f"message {sequence} of {BATCHES.name}, a batch, is gone")
    try:
        return await read(bus, BatchPacked, record)
    except (BlobMissing, WireError) as error:
        raise ActorFault(f"message {sequence} of {BATCHES.name}, a batch: {error}") from error


class PayloadGone(ActorFault):
    """Tokens of a batch that are not stored any more."""


async def fetch_trajectories(
    bus: Bus, packed: BatchPacked, rank: int = 0, owners: Sequence[int] | None = None, part: Part | None = _WHOLE
) -> list[GradedGroup]:
    """The groups of a batch, in the order it names them; of a member that was purged since, the counts alone are known.

    Args:
        rank: number of the rank whose share of the batch is fetched; of all others only the counts are known.
        owners: the rank of each trajectory, in the order the batch names them; this one has all where left out.
        part: of the experts of their tokens that is fetched; None for none.

    Raises:
        PayloadGone: tokens are trimmed.
        ActorFault: tokens are not those that were graded.
    """
    _check_doubles(packed)
    limit = asyncio.Semaphore(_AT_ONCE)

    async def fetch(member: BatchMember, owner: int) -> GradedTrajectory:
        elsewhere = _without_tokens(member)
        if owner != rank:
            return elsewhere
        async with limit:
            try:
                result, routing = await _result(bus, packed.step, member, part)
            except SecretGone:  # as if another rank had it: purged tokens have no gradient
                return elsewhere
        segments = result.segments
        if member.overruled:  # by a user, who speaks against the judge that gave the hints
            segments = [msgspec.structs.replace(segment, hinted=[]) for segment in segments]
        return elsewhere._replace(segments=segments, elsewhere=0, routing=routing)

    named = [member for group in packed.groups for member in group.members]
    fetched = iter(await asyncio.gather(*map(fetch, named, owners or [rank] * len(named))))
    return [
        GradedGroup(
            [next(fetched) for _ in group.members],
            group.estimator,
            group.temperature,
            before=[_without_tokens(member) for member in group.before],
        )
        for group in packed.groups
    ]


def _without_tokens(member: BatchMember) -> GradedTrajectory:
    return GradedTrajectory(
        member.trajectory_id,
        (),
        member.reward,
        member.tokens,
        turn_rewards=member.turn_rewards,
        metrics=member.metrics,
    )


async def _result(
    bus: Bus, step: int, member: BatchMember, part: Part | None
) -> tuple[TrajectoryGenerated, list[Routed]]:
    try:
        result = await read_result(bus, member.payload)
        routing = await read_routing(bus, result, part) if part is not None else []
    except BlobMissing as error:
        raise PayloadGone(f"batch {step}, {member.trajectory_id}: {error}") from error
    except WireError as error:
        raise ActorFault(f"batch {step}, {member.trajectory_id}: {error}") from error
    if (result.trajectory_id, result.attempt) != (member.trajectory_id, member.attempt):
        raise ActorFault(
            f"batch {step}: message {member.payload.sequence} holds {result.trajectory_id} (attempt "
            f"{result.attempt}), and the batch names it as {member.trajectory_id} (attempt {member.attempt})"
        )
    return result, routing


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
