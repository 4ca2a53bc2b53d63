"""Streams and work queues of a run, made from the topic table."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusRefused, ProvisionError
from asyncrl.bus.log import patiently
from topics.evals import EVAL_REQUESTED
from topics.prompts import PROMPT_ISSUED
from topics.topic import DEAD, PROMPTS, STREAMS, Keep, Stream, Topic
from topics.trajectories import TRAJECTORY_GENERATED

_NAME_IN_USE = 10058
NO_STREAM = 10059
_MB = 1_000_000
_SETTLE_S = 60.0
_OPEN_LIMIT = 1_000_000  # above every number of open trajectories: the server's default of 1000 stops silently


class WorkQueue(NamedTuple):
    """A durable consumer that many workers share."""

    name: str
    topic: Topic[Any]

    @property
    def stream(self) -> Stream:
        """The stream it reads."""
        return self.topic.stream


QUEUES = {
    "rollout": WorkQueue("rollout", PROMPT_ISSUED),
    "reward": WorkQueue("reward", TRAJECTORY_GENERATED),
    "evaluator": WorkQueue("evaluator", EVAL_REQUESTED),
}


def stream_config(run: str, stream: Stream, *, payload_mb: int, ledger_mb: int, copies: int = 1) -> dict[str, Any]:
    """The server-side configuration of one stream."""
    stored, published = f"asyncrl.{run}.>", stream.ingest(f"asyncrl.{run}.>")
    last = stream.keep is Keep.LAST
    return {
        "name": stream.full_name(run),
        "subjects": [published],
        "subject_transform": {"src": published, "dest": stored},
        "retention": "limits",
        "storage": "memory" if last else "file",
        "discard": "old" if last or stream is DEAD else "new",  # no flood of bad messages stops who reports them
        "max_bytes": (payload_mb if stream.keep is Keep.PAYLOAD else 64 if last else ledger_mb) * _MB,
        "max_msgs_per_subject": 1 if last else -1,
        "allow_direct": True,
        "allow_msg_ttl": True,
        "duplicate_window": 120_000_000_000,
        "num_replicas": copies,
        "description": stream.about,
    }


async def provision(bus: Bus, *, payload_mb: int, ledger_mb: int, lease_s: float, copies: int = 1) -> None:
    """Make what is missing; what is there must be as the table says.

    Args:
        copies: servers that keep each stream; a cluster that finds itself is waited for.

    Raises:
        ProvisionError: a stream of that name is there with other settings, or the server has no room.
        BusUnreachable, BusGone: JetStream does not answer.
    """
    for stream in STREAMS:
        config = stream_config(bus.run, stream, payload_mb=payload_mb, ledger_mb=ledger_mb, copies=copies)
        try:
            await _ask(bus, f"STREAM.CREATE.{config['name']}", config)
        except BusRefused as error:
            if error.code == _NAME_IN_USE:
                raise ProvisionError(await _difference(bus, config)) from error
            raise ProvisionError(f"stream {config['name']} could not be made: {error.description}") from error
    for queue in QUEUES.values():
        await make_queue(bus, queue, lease_s)


async def make_queue(bus: Bus, queue: WorkQueue, lease_s: float) -> None:
    """Make the durable consumer of a worker pool."""
    stream = queue.stream.full_name(bus.run)
    config = {
        "durable_name": queue.name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": int(lease_s * 1e9),
        "max_deliver": -1,
        "max_ack_pending": _OPEN_LIMIT,
        "max_waiting": 4096,
        "filter_subject": queue.topic.pattern(bus.run),
        "replay_policy": "instant",
    }
    try:
        await _ask(bus, f"CONSUMER.CREATE.{stream}.{queue.name}", {"stream_name": stream, "config": config})
    except BusRefused as error:
        raise ProvisionError(
            f"work queue {queue.name} on {stream} could not be made: {error.description}; "
            "was the run provisioned with another rollout.lease_s?"
        ) from error


async def is_provisioned(bus: Bus) -> bool:
    """Whether the run has streams on this server."""
    try:
        await _ask(bus, f"STREAM.INFO.{STREAMS[0].full_name(bus.run)}")
    except BusRefused as error:
        if error.code == NO_STREAM:
            return False
        raise
    return True


async def runs_on(bus: Bus) -> list[str]:
    """Ids of the runs that have streams on this server, sorted.

    Raises:
        BusDenied: the user may not list streams.
    """
    before, after = PROMPTS.full_name("*").split("*")
    names: list[str] = []
    while True:
        page = await bus.api("STREAM.NAMES", {"offset": len(names)})
        names += page.get("streams") or []
        if len(names) >= page["total"] or not page.get("streams"):
            break
    return sorted(name[len(before) : -len(after)] for name in names if name.startswith(before) and name.endswith(after))


async def remove_streams(bus: Bus) -> int:
    """Delete all that the server holds of a run; returns how many streams there were."""
    count = 0
    for stream in STREAMS:
        try:
            await bus.api(f"STREAM.DELETE.{stream.full_name(bus.run)}")
            count += 1
        except BusRefused as error:
            if error.code != NO_STREAM:
                raise
    return count


async def stream_states(bus: Bus, streams: Sequence[Stream] = STREAMS) -> dict[str, dict[str, Any]]:
    """Messages, bytes, sequences and `now` (the server's clock) of some of a run's streams, by name."""
    states = {}
    for stream in streams:
        info = await bus.api(f"STREAM.INFO.{stream.full_name(bus.run)}")
        states[stream.name] = {**info["state"], "max_bytes": info["config"]["max_bytes"], "now": info["ts"]}
    return states


async def queue_states(bus: Bus) -> dict[str, dict[str, int]]:
    """What waits, what is under way, and how many workers ask, in each work queue."""
    states = {}
    for name, queue in QUEUES.items():
        info = await bus.api(f"CONSUMER.INFO.{queue.stream.full_name(bus.run)}.{name}")
        states[name] = {
            "waiting": int(info["num_pending"]),
            "under_way": int(info["num_ack_pending"]),
            "redelivered": int(info["num_redelivered"]),
            "pulls": int(info["num_waiting"]),  # open requests for work
        }
    return states


async def settled(bus: Bus) -> None:
    """Wait until each of the run's streams has a leader, and all copies of it are as new as the leader's.

    Raises:
        TimeoutError: they do not come together.
    """
    async with asyncio.timeout(_SETTLE_S):
        for stream in STREAMS:
            while True:
                info = await _ask(bus, f"STREAM.INFO.{stream.full_name(bus.run)}")
                group = info.get("cluster", {})
                if group.get("leader") and all(copy.get("current") for copy in group.get("replicas") or []):
                    break
                await asyncio.sleep(0.2)  # nothing announces it


async def _ask(bus: Bus, call: str, body: object = None) -> dict[str, Any]:
    """Call the API; where several servers elect a leader first, again until they have one."""
    if not bus.clustered:
        return await bus.api(call, body)
    return await patiently(bus, lambda: bus.api(call, body))


async def _difference(bus: Bus, wanted: dict[str, Any]) -> str:
    found = (await bus.api(f"STREAM.INFO.{wanted['name']}"))["config"]
    differing = [
        f"{key} is {found.get(key)!r}, expected {value!r}" for key, value in wanted.items() if found.get(key) != value
    ]
    return (
        f"stream {wanted['name']} is already there with other settings: {'; '.join(differing) or 'unknown'}; "
        "choose another run id, or delete that stream if nobody needs it"
    )
