"""Streams and work queues of a run, made from the topic table."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusRefused, ProvisionError, ServerFull
from asyncrl.bus.layout import DEFAULT, StreamLayout
from asyncrl.bus.log import retry_until_deadline
from topics.table import BUILT_IN, Tables, WorkQueue
from topics.topic import PROMPTS, STREAMS, Retention, Stream

UNLIMITED = -1  # size of a stream that may take the room that the server has
NO_STREAM = 10059
_OTHER_CONSUMER = 10148  # one of this name is there, with other settings
_NO_ROOM = (10002, 10005, 10047)  # of the account, of every server of a cluster, of this server
_MB = 1_000_000
_SETTLE_S = 60.0
_OPEN_LIMIT = 1_000_000  # above every number of open trajectories: the server's default of 1000 stops silently


def equal_sizes(*, payload_mb: int, ledger_mb: int, tables: Tables = BUILT_IN) -> dict[str, int]:
    """Bytes that each stream may hold, by name, where all of one kind are equal.

    Args:
        ledger_mb: of a log; `UNLIMITED` for the room that the server has.
    """
    ledger = ledger_mb if ledger_mb == UNLIMITED else ledger_mb * _MB
    sizes = {Retention.PAYLOAD: payload_mb * _MB, Retention.LEDGER: ledger, Retention.LAST: 64 * _MB}
    return {stream.name: sizes[stream.keep] for stream in tables.streams}


async def provision(bus: Bus, sizes: Mapping[str, int], *, lease_s: float, layout: StreamLayout = DEFAULT) -> None:
    """Create missing streams and give each its size; existing ones must otherwise match the table.

    Args:
        sizes: bytes that each stream may hold, by name.
        layout: servers that keep the streams; a cluster that finds itself is waited for.

    Raises:
        ServerFull: the server has no room; streams are as they were before.
        ProvisionError: a stream of that name is there with other settings, or cannot be made.
        BusUnreachable, BusGone: JetStream does not answer.
    """
    infos = {stream: await _info(bus, stream.full_name(bus.run)) for stream in bus.tables.streams}
    found = {stream: info["config"] for stream, info in infos.items() if info is not None}
    await _check_queues(bus, [stream for stream, info in infos.items() if info and info["state"]["consumer_count"]])
    done: list[Stream] = []
    # Those that shrink come first: their room may be what others need.
    growth = {stream: sizes[stream.name] - found.get(stream, {}).get("max_bytes", 0) for stream in bus.tables.streams}
    for stream in sorted(growth, key=growth.__getitem__):
        config = layout.config(bus.run, stream, sizes[stream.name])
        try:
            if await _give(bus, config, found.get(stream)):
                done.append(stream)
        except BusRefused as error:
            for changed in reversed(done):
                await _give_back(bus, changed, found.get(changed))
            if error.code in _NO_ROOM and config["storage"] == "file":
                sized = [sizes[stream.name] for stream in growth if stream.keep is not Retention.LAST]
                raise ServerFull(sum(size for size in sized if size != UNLIMITED)) from error
            raise ProvisionError(f"stream {config['name']} could not be made: {error.description}") from error
    for queue in bus.tables.queues.values():
        await make_queue(bus, queue, lease_s)


async def make_queue(bus: Bus, queue: WorkQueue, lease_s: float) -> None:
    """Make the durable consumer of a worker pool, or give one that is there its lease.

    Raises:
        ProvisionError: it cannot be made, or the one that is there hands out the messages of another topic.
    """
    stream = queue.stream.full_name(bus.run)
    pattern = queue.pattern(bus.run)
    config = {
        "durable_name": queue.name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": int(lease_s * 1e9),
        "max_deliver": -1,
        "max_ack_pending": _OPEN_LIMIT,
        "max_waiting": 4096,
        "filter_subject": pattern,
        "replay_policy": "instant",
    }
    call = f"CONSUMER.CREATE.{stream}.{queue.name}"
    try:
        try:
            await _ask(bus, call, {"stream_name": stream, "config": config, "action": "create"})
        except BusRefused as error:
            if error.code != _OTHER_CONSUMER:
                raise
            found = (await queue_info(bus, queue))["config"].get("filter_subject", "")
            if found != pattern:  # the server would hand out only new messages and skip the stored ones
                raise _moved(queue.name, found, pattern) from error
            await _ask(bus, call, {"stream_name": stream, "config": config})
    except BusRefused as error:
        words = f"work queue {queue.name} on {stream} could not be made: {error.description}"
        raise ProvisionError(f"{words}; has the server had a queue of this name with other settings?") from error


async def _check_queues(bus: Bus, streams: Sequence[Stream]) -> None:
    """Refuse a queue that exists on another stream: its pending messages would be lost.

    Args:
        streams: those that have consumers.

    Raises:
        ProvisionError: there is one.
    """
    for stream in streams:
        names = (await _ask(bus, f"CONSUMER.NAMES.{stream.full_name(bus.run)}")).get("consumers") or []
        for queue in [bus.tables.queues[name] for name in names if name in bus.tables.queues]:
            if queue.stream is not stream:
                found = (await _ask(bus, f"CONSUMER.INFO.{stream.full_name(bus.run)}.{queue.name}"))["config"]
                raise _moved(queue.name, found.get("filter_subject", ""), queue.pattern(bus.run))


def _moved(name: str, found: str, expected: str) -> ProvisionError:
    return ProvisionError(
        f"work queue {name} of this run hands out {found}, and is to hand out {expected}: the row of its actor had "
        "another queue when the run began; give it that one back, or begin another run"
    )


async def is_provisioned(bus: Bus) -> bool:
    """Return whether the run has streams on this server."""
    return await _info(bus, STREAMS[0].full_name(bus.run)) is not None


class Held(NamedTuple):
    """Bytes of a stream."""

    stored: int
    most: int


async def held_bytes(bus: Bus) -> dict[str, Held]:
    """Return content and size of each of a run's streams on disk, by name."""
    held = {}
    for stream in bus.tables.streams:
        info = await _info(bus, stream.full_name(bus.run)) if stream.keep is not Retention.LAST else None
        if info is not None:
            held[stream.name] = Held(int(info["state"]["bytes"]), int(info["config"]["max_bytes"]))
    return held


async def runs_on(bus: Bus) -> list[str]:
    """Ids of the runs that have streams on this server, sorted; of those that the user serves, if it serves some only.

    Raises:
        BusDenied: the user may not look at streams.
    """
    if served := bus.address.runs:  # such a user may ask for these streams, and not for a list of all
        infos = [await _info(bus, PROMPTS.full_name(run)) for run in served]
        return sorted(run for run, info in zip(served, infos, strict=True) if info is not None)
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
    for stream in bus.tables.streams:
        try:
            await bus.api(f"STREAM.DELETE.{stream.full_name(bus.run)}")
            count += 1
        except BusRefused as error:
            if error.code != NO_STREAM:
                raise
    return count


async def stream_states(bus: Bus, streams: Sequence[Stream] = ()) -> dict[str, dict[str, Any]]:
    """Messages, bytes, sequences and `now` (the server's clock) of a run's streams, or of some, by name."""
    states = {}
    for stream in streams or bus.tables.streams:
        info = await bus.api(f"STREAM.INFO.{stream.full_name(bus.run)}")
        states[stream.name] = {**info["state"], "max_bytes": info["config"]["max_bytes"], "now": info["ts"]}
    return states


async def queue_info(bus: Bus, queue: WorkQueue) -> dict[str, Any]:
    """The server's description of a work queue."""
    return await bus.api(f"CONSUMER.INFO.{queue.stream.full_name(bus.run)}.{queue.name}")


async def queue_states(bus: Bus) -> dict[str, dict[str, int]]:
    """Return the numbers of waiting and delivered messages and of waiting workers of each work queue."""
    states = {}
    for name, queue in bus.tables.queues.items():
        info = await queue_info(bus, queue)
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
        for stream in bus.tables.streams:
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
    return await retry_until_deadline(bus, lambda: bus.api(call, body))


async def _give(bus: Bus, config: dict[str, Any], found: dict[str, Any] | None) -> bool:
    """Make a stream, or give one that is there its size; returns whether anything changed.

    Args:
        found: settings of the one that is there.

    Raises:
        BusRefused: the server does not take it.
        ProvisionError: the one that is there has other settings.
    """
    if found is None:
        await _ask(bus, f"STREAM.CREATE.{config['name']}", config)
        return True
    differing = [key for key, value in config.items() if found.get(key, "") != value and key != "max_bytes"]
    if differing:
        differences = "; ".join(f"{key} is {found.get(key)!r}, expected {config[key]!r}" for key in differing)
        raise ProvisionError(
            f"stream {config['name']} is already there with other settings: {differences}; choose another run id, or "
            "delete that stream if it is not needed"
        )
    # Requested only if it differs: a server whose disk became smaller refuses even the current size.
    if changes := found["max_bytes"] != config["max_bytes"]:
        await _ask(bus, f"STREAM.UPDATE.{config['name']}", config)
    return bool(changes)


async def _give_back(bus: Bus, stream: Stream, found: dict[str, Any] | None) -> None:
    if found is None:
        await _ask(bus, f"STREAM.DELETE.{stream.full_name(bus.run)}")
    else:
        await _ask(bus, f"STREAM.UPDATE.{found['name']}", found)


async def _info(bus: Bus, name: str) -> dict[str, Any] | None:
    try:
        return await _ask(bus, f"STREAM.INFO.{name}")
    except BusRefused as error:
        if error.code == NO_STREAM:
            return None
        raise
