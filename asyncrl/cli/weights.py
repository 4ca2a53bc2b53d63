"""`asyncrl weights`: list the versions of a run, and move its channel `live`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any, TypeAlias

from actors.supervisor.canary import Canary
from asyncrl.bus.chunks import ChunkLog
from asyncrl.bus.connection import Bus
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record
from asyncrl.bus.merged_reader import Part, read_merged
from asyncrl.bus.publish import publish
from asyncrl.cli.options import add_flag, add_option
from asyncrl.cli.output import add_json, show
from asyncrl.cli.target import action_of, add_action, add_wait, any_run, live_run, read_topics
from asyncrl.config.weights_settings import store_kind
from asyncrl.errors import AsyncRLError, WrongUsage
from asyncrl.live.tenant_keys import owner_of, tenant_digest
from asyncrl.run.connect import FoundRun, connected, newest_end, run_ended
from asyncrl.weights.store import StorePlace
from topics.promotions import (
    CANARY_ENDED,
    PROMOTION_REFUSED,
    WEIGHTS_CANARIED,
    WEIGHTS_PROMOTED,
    CanaryEnded,
    PromotionRefused,
    PromotionRequested,
    WeightsCanaried,
    WeightsPromoted,
)
from topics.topic import FLEET, SESSIONS, TRAINING, Topic
from topics.turns import TURN_ADMITTED, TURN_SKIPPED, TurnAdmitted, TurnSkipped
from topics.weights import WEIGHTS_PUBLISHED, WEIGHTS_STORED, WeightsPublished

_Answer: TypeAlias = WeightsPromoted | WeightsCanaried | CanaryEnded | PromotionRefused
_TAKES = {"list": "", "promote": "VERSION", "rollback": ""}
_NEWEST = 64  # versions that are looked up in the store, in addition to promoted ones and canaries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "list versions, promote one, or go back to the one before (default: list)"
    add_action(parser, "list | promote VERSION | rollback", about)
    add_option(parser, "--canary SHARE", float, "promote: as a canary, which answers this share of the sessions")
    about = "promote: as a shadow, which answers this share of the sessions too, unseen, to be compared"
    add_option(parser, "--shadow SHARE", float, about)
    add_option(parser, "--tenant NAME", "", "canary, shadow: only sessions of this tenant")
    add_option(parser, "--client NAME", "", "canary, shadow: only this user of the tenant")
    add_flag(parser, "--force", "promote: even if it is beyond live.safety.kl_bound")
    add_json(parser, "as one JSON array")
    add_wait(parser, 30.0)


def run(arguments: argparse.Namespace) -> int:
    """List, or move and report."""
    action, word = action_of(arguments, _TAKES)
    if action == "promote" and not word.isdecimal():
        raise WrongUsage(f"asyncrl weights promote VERSION: expected a whole number from 0; found {word!r}")
    request = _request(arguments, action, int(word) if word else None)
    if action == "list":
        found = any_run(arguments)
        versions = read_topics(found, "weights", lambda bus: _versions(bus, found))
        show(arguments, versions, lambda: _table(versions))
        return 0
    print(asyncio.run(_move(live_run(arguments), request, arguments.wait)))
    return 0


def _request(arguments: argparse.Namespace, action: str, version: int | None) -> PromotionRequested:
    shadow, tenant, user = arguments.shadow is not None, arguments.tenant, arguments.client
    share = _share(arguments, action)
    if (tenant and share is None) or (user and not tenant):
        words = "--tenant names whose sessions a --canary or --shadow has, and --client one of that tenant's users"
        raise WrongUsage(words)
    owner = owner_of(tenant, user) if user else tenant_digest(tenant) if tenant else ""
    if arguments.force and action != "promote":
        raise WrongUsage("--force is of promote: list and rollback are refused by no bound")
    return PromotionRequested(version, share or 0.0, owner, force=arguments.force, shadow=shadow)


async def _move(found: FoundRun, request: PromotionRequested, wait_s: float) -> str:
    answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()

    async with connected(found, "weights") as bus:
        end = await newest_end(bus)
        cause = await publish(bus, request)

        def take(_topic: Topic[Any], message: _Answer, _record: Record) -> None:
            if message.by in ("command", "rollback") and message.cause == cause and not answer.done():
                answer.set_result(message)

        topics = (WEIGHTS_PROMOTED, WEIGHTS_CANARIED, CANARY_ENDED, PROMOTION_REFUSED)
        subjects = [topic.pattern(bus.run) for topic in topics]
        listener = Listener(bus, FLEET, take, lambda _record, _error: None, subjects=subjects)
        ended = asyncio.create_task(run_ended(bus, end))
        await listener.start()
        waits: set[asyncio.Future[Any]] = {answer, ended}
        try:
            await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            await listener.close()
        if not answer.done():
            words = "the run ended" if ended.done() else f"{wait_s:g} s passed"
            raise AsyncRLError(
                f"{words} before the supervisor answered; the request stands, and it answers it when it "
                "runs again (asyncrl weights list shows what is live)"
            )
    decision = answer.result()
    if isinstance(decision, PromotionRefused):
        raise AsyncRLError(decision.reason)
    if isinstance(decision, CanaryEnded):
        return f"the canary {decision.key} is rolled back; the version before stays live"
    if isinstance(decision, WeightsCanaried):
        kind = "shadow" if decision.shadow else "canary"
        return f"{kind}: version {decision.version} ({decision.key}) for {decision.share:g} of the sessions"
    return f"live: version {decision.version} ({decision.key})"


def _mark(published: dict[str, dict[str, Any]], moves: list[WeightsPromoted | WeightsCanaried | CanaryEnded]) -> None:
    """Mark the versions that were promoted or rolled back, and the live one."""
    live: dict[str, Any] = {}
    for move in moves:
        row = published.get(move.key, {})
        if isinstance(move, CanaryEnded):
            row["rolled_back"] = move.reason
        elif isinstance(move, WeightsPromoted):
            row["promoted"], live = move.by, row
    live["live"] = True


def _share(arguments: argparse.Namespace, action: str) -> float | None:
    """Return the share of the sessions of a canary or shadow."""
    shadow = arguments.shadow is not None
    if shadow and arguments.canary is not None:
        raise WrongUsage("--canary and --shadow: users get the answers of a canary, not those of a shadow; name one")
    share, name = (arguments.shadow, "--shadow") if shadow else (arguments.canary, "--canary")
    if share is not None and (action != "promote" or not 0 < share <= 1):
        raise WrongUsage(f"{name} {share:g}: promote takes a share of the sessions above 0 and up to 1")
    if share == 1 and not (arguments.tenant or shadow):
        raise WrongUsage("--canary 1 leaves no other sessions to compare with; name a smaller share, or a --tenant")
    return None if share is None else float(share)


async def _versions(bus: Bus, found: FoundRun) -> list[dict[str, Any]]:
    """Return the versions that are in the store or live, in the order in which it was published."""
    published: dict[str, dict[str, Any]] = {}
    moves: list[tuple[WeightsPromoted | WeightsCanaried | CanaryEnded, int]] = []

    def on_published(_topic: Topic[Any], message: WeightsPublished, _record: Record) -> None:
        names = ("lineage", "version", "digest", "store", "location", "base")
        published[message.key] = {name: getattr(message, name) for name in names} | {
            "promoted": "",
            "live": False,
            "canary": 0.0,
            "shadow": False,
            "compared": {},
            "rolled_back": "",
        }

    def on_move(_topic: Topic[Any], move: WeightsPromoted | WeightsCanaried | CanaryEnded, record: Record) -> None:
        moves.append((move, record.sequence))

    for stream, topics, take in (
        (TRAINING, [WEIGHTS_PUBLISHED], on_published),
        (FLEET, [WEIGHTS_PROMOTED, WEIGHTS_CANARIED, CANARY_ENDED], on_move),
    ):
        subjects = [topic.pattern(bus.run) for topic in topics]
        await read_merged(bus, [Part(stream, subjects=subjects)], take, lambda *_: None)
    _mark(published, [move for move, _ in moves])
    newest, trial = moves[-1] if moves else (None, 0)
    if isinstance(newest, WeightsCanaried) and newest.key in published:
        compared = await _compared(bus, newest, trial)
        published[newest.key] |= {"canary": newest.share, "shadow": newest.shadow, "compared": compared}
    rows = of_interest(list(published.values()))
    kept = [await _is_kept(bus, found, row) for row in rows]
    return [row for row, is_kept in zip(rows, kept, strict=True) if is_kept or row["live"]]


def of_interest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest versions, and those that were promoted or canaries.

    Of newer versions with the same bits, which are one in the store, the first and the newest are there: the others are
    soon forgotten. Each gets a field `same_as`: the first version with its bits, None for that one.
    """
    newest = {row["location"]: row for row in rows}
    first: dict[str, int] = {}
    found = []
    for number, row in enumerate(rows):
        row["same_as"] = first.get(row["location"])
        first.setdefault(row["location"], row["version"])
        fresh = number >= len(rows) - _NEWEST and (row["same_as"] is None or row is newest[row["location"]])
        if fresh or row["promoted"] or row["live"] or row["canary"] or row["rolled_back"]:
            found.append(row)
    return found


async def _compared(bus: Bus, message: WeightsCanaried, trial: int) -> dict[str, float]:
    """Return the rewards of a canary's turns so far, and of the others, as the supervisor counts them."""
    canary = Canary()
    canary.begin(message, trial)

    def take(_topic: Topic[Any], message: TurnAdmitted | TurnSkipped, _record: Record) -> None:
        for end in message.turns if isinstance(message, TurnAdmitted) else [message]:
            canary.count(end)

    part = Part(SESSIONS, subjects=[topic.pattern(bus.run) for topic in (TURN_ADMITTED, TURN_SKIPPED)])
    await read_merged(bus, [part], take, lambda *_: None)
    return {name: value for name, value in canary.figures().items() if name != "canary_version"}


async def _is_kept(bus: Bus, found: FoundRun, row: dict[str, Any]) -> bool:
    """Return whether a version is in its store; a directory of another machine is not known, and may be."""
    store = store_kind(row["store"]).open(StorePlace(found.root or Path(), ChunkLog(bus, WEIGHTS_STORED)))
    return (store.is_local and found.root is None) or await store.has(row["location"])


def _table(versions: list[dict[str, Any]]) -> str:
    if not versions:
        return "there is no version in the store"
    lines = [f"{'version':>8}  {'lineage':>7}  {'digest':<12}  {'':<6}  {'promoted':<8}  name"]
    for row in versions:
        trial = "shadow" if row["shadow"] else "canary"
        mark, digest = "live" if row["live"] else trial if row["canary"] else "", row["digest"][:12]
        if row["same_as"] is not None:
            place = f"the bits of version {row['same_as']}"
        else:
            place = f"{Path(row['location']).name}{' (difference)' if row['base'] else ''}"
        lines.append(
            f"{row['version']:>8}  {row['lineage']:>7}  {digest:<12}  {mark:<6}  {row['promoted']:<8}  {place}"
        )
        if row["compared"]:
            turns, reward, others, theirs = row["compared"].values()
            lines.append(f"{'':>8}  mean reward {reward:.4g} of {turns:.0f} turns; others {theirs:.4g} of {others:.0f}")
        if row["rolled_back"]:
            lines.append(f"{'':>8}  canary rolled back: {row['rolled_back']}")
    return "\n".join(lines)
