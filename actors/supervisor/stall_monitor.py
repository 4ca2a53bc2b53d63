"""The stall monitor of the supervisor: where nothing is trained for seconds, it finds the cause and publishes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from actors.runtime.actor import Context
from actors.runtime.keeper import Keeper
from asyncrl.state.diagnose import diagnose
from asyncrl.state.watch import LIMIT_S, Watch, disk_of
from topics.stalls import StallEnded
from topics.table import topic_for
from topics.wire import Message

_QUIET_S = 4.0  # a run that trains is well, and pays nothing
_AGAIN_S = 3.0
_REPORTED_ELSEWHERE = ("dead letters",)  # they have a topic of their own and do not stall the run


async def watch_for_stalls(context: Context, keeper: Keeper, watch: Watch, trained: Callable[[], int]) -> None:
    """Publish `stall.found` and `stall.ended` on the keeper's log until the actor is asked to stop.

    Args:
        watch: of the run.
        trained: how many batches are known to be trained.
    """
    state = watch.state
    count, since, found = -1, time.monotonic(), True  # a supervisor before this one may have found something
    while not context.stop.is_set():
        await asyncio.sleep(_AGAIN_S)
        if trained() != count:
            count, since = trained(), time.monotonic()
        if not found and time.monotonic() - since < _QUIET_S:
            continue
        try:
            async with asyncio.timeout(LIMIT_S):
                await watch.examine()
            state.disks = [disk_of(context.files.root)]
            found_now = [finding for finding in diagnose(state) if finding.cause not in _REPORTED_ELSEWHERE]
        except Exception as error:  # a doctor's mistake must not end the supervisor, which heals the run
            context.log.warning("no look at the run", reason=f"{type(error).__name__}: {error}")
            continue
        if context.stop.is_set():
            return  # an actor that leaves now was asked to
        findings = {(finding.cause, finding.object): finding for finding in found_now}
        decisions: list[Message] = [new for key, new in findings.items() if key not in state.stalls]
        decisions += [StallEnded(old.cause, old.object) for key, old in state.stalls.items() if key not in findings]
        found = bool(findings)
        for decision in decisions:
            context.log.warning(topic_for(decision).name, **msgspec.to_builtins(decision))
        if decisions:
            await keeper.append_until_stored(decisions)
