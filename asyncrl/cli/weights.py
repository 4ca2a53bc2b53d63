"""`asyncrl weights`: list the versions of a run, and move its channel `live`."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from asyncrl.bus.connection import Bus
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record
from asyncrl.bus.publish import publish
from asyncrl.cli.output import add_json, show
from asyncrl.cli.target import add_directory, add_server, any_run, live_run, read_topics
from asyncrl.errors import AsyncRLError, WrongUsage
from asyncrl.run.connect import connected
from asyncrl.run.find import FoundRun
from topics.promotions import (
    PROMOTION_REFUSED,
    WEIGHTS_PROMOTED,
    PromotionRefused,
    PromotionRequested,
    WeightsPromoted,
)
from topics.topic import FLEET, TRAINING, Topic
from topics.weights import WEIGHTS_PUBLISHED, WeightsPublished

_SHOWN = 20  # newest versions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("action", choices=("list", "promote", "rollback"), help="what to do")
    parser.add_argument("version", nargs="?", type=int, metavar="VERSION", help="to promote")
    parser.add_argument(
        "--run-id", default="", metavar="RUN", help="id or directory of the run (default: the live one)"
    )
    add_directory(parser)
    add_server(parser)
    add_json(parser, "as one JSON array")
    parser.add_argument("--wait", type=float, default=30.0, metavar="SECONDS", help="give up after (default: 30)")


def run(arguments: argparse.Namespace) -> int:
    """List, or move and report."""
    if (arguments.action == "promote") != (arguments.version is not None):
        raise WrongUsage("asyncrl weights promote VERSION names a version; list and rollback name none")
    if arguments.action == "list":
        versions = read_topics(any_run(arguments), "weights", _versions)
        show(arguments, versions, lambda: _table(versions))
        return 0
    print(asyncio.run(_move(live_run(arguments), arguments.version, arguments.wait)))
    return 0


async def _move(found: FoundRun, version: int | None, wait_s: float) -> str:
    """Ask the supervisor, and return its answer."""
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    cause = 0

    def take(_topic: Topic[Any], message: WeightsPromoted | PromotionRefused, _record: Record) -> None:
        if message.by == "gate" or message.cause != cause or answer.done():
            return
        if isinstance(message, PromotionRefused):
            answer.set_exception(AsyncRLError(message.reason))
        else:
            answer.set_result(f"live: version {message.version} ({message.key})")

    async with connected(found, "weights") as bus:
        cause = await publish(bus, PromotionRequested(version))
        listener = _listener(bus, take)
        await listener.start()
        try:
            async with asyncio.timeout(wait_s):
                return await answer
        except TimeoutError:
            raise AsyncRLError(
                f"the supervisor did not answer within {wait_s:.0f} s; asyncrl status shows it"
            ) from None
        finally:
            await listener.close()


def _listener(bus: Bus, take: Any) -> Listener:
    subjects = [topic.pattern(bus.run) for topic in (WEIGHTS_PROMOTED, PROMOTION_REFUSED)]
    return Listener(bus, FLEET, take, lambda _record, _error: None, subjects=subjects)


async def _versions(bus: Bus) -> list[dict[str, Any]]:
    """The newest versions and all that were promoted, in the order in which they were published."""
    published: dict[str, dict[str, Any]] = {}
    live: list[str] = []

    def on_published(_topic: Topic[Any], message: WeightsPublished, _record: Record) -> None:
        names = ("lineage", "version", "digest", "store", "location", "base")
        published[message.key] = {name: getattr(message, name) for name in names} | {"promoted": "", "live": False}

    def on_decided(_topic: Topic[Any], message: WeightsPromoted | PromotionRefused, _record: Record) -> None:
        if isinstance(message, WeightsPromoted):
            live[:] = [message.key]
            if message.key in published:
                published[message.key]["promoted"] = message.by

    versions = Listener(
        bus, TRAINING, on_published, lambda _record, _error: None, subjects=[WEIGHTS_PUBLISHED.pattern(bus.run)]
    )
    await versions.read()
    await _listener(bus, on_decided).read()
    for key in live:
        if key in published:
            published[key]["live"] = True
    rows = list(published.values())
    return [row for row in rows[:-_SHOWN] if row["promoted"]] + rows[-_SHOWN:]


def _table(versions: list[dict[str, Any]]) -> str:
    if not versions:
        return "no version was published yet"
    lines = [f"{'version':>8}  {'lineage':>7}  {'digest':<12}  {'':<5}  {'promoted by':<11}  location"]
    for row in versions:
        mark, digest = "live" if row["live"] else "", row["digest"][:12]
        place = f"{row['location']}{' (difference)' if row['base'] else ''}"
        lines.append(
            f"{row['version']:>8}  {row['lineage']:>7}  {digest:<12}  {mark:<5}  {row['promoted']:<11}  {place}"
        )
    return "\n".join(lines)
