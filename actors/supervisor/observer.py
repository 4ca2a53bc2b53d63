"""The supervisor's view of the run: published once a second, and examined after some seconds without a trained step."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

from actors.runtime.actor import Context
from actors.runtime.keeper import Keeper
from asyncrl.bus.errors import BusError
from asyncrl.bus.publish import send
from asyncrl.state.diagnose import diagnose
from asyncrl.state.health_checks import AWAY
from asyncrl.state.records import Event
from asyncrl.state.run_state import RunState
from asyncrl.state.startup import StartupLines
from asyncrl.state.status import EVENTS, run_moment, run_status, shortened
from asyncrl.state.watch import LIMIT_S, Watch, disk_of
from topics.stalls import StallEnded
from topics.wire import Message

_PUBLISH_S = 1.0
_KEPT_S: dict[Literal["1s", "10s", "60s"], int] = {"1s": 600, "10s": 6 * 3600, "60s": 0}  # moments; 0: always
_LISTED = 256  # actors, and engines
_RETRY_S = 5.0
_QUIET_S = 4.0  # a run that trains is well, and pays nothing
_EXAMINE_S = 3.0
_REPORTED_ELSEWHERE = ("dead letters",)  # they have a separate topic and do not stall the run


async def follow_run(context: Context) -> Watch:
    """Follow the run from now on."""
    while True:
        watch = Watch(context.bus, RunState(context.bus.run, context.config.learner.steps))
        try:
            await watch.start()
        except BusError as error:  # nothing of the run depends on it
            context.log.warning("state not read", reason=str(error))
            await watch.close()
            await asyncio.sleep(_RETRY_S)  # nothing announces that the server answers again
        else:
            return watch


async def publish_state(context: Context, watch: Watch, now: Callable[[], float]) -> None:
    """Publish the state of the run until the actor is asked to stop, and return whether other hosts are out of reach.

    Args:
        now: the server's clock, seconds since the epoch.
    """
    events, startup = deque[Event](maxlen=EVENTS), StartupLines()
    due_s = dict.fromkeys(_KEPT_S, 0.0)  # of the next moment of each kind
    while not context.stop.is_set():
        context.vitals[AWAY] = context.placement.away_s
        now_s = now()
        startup.report(watch.state, int(now_s * 1e9))
        new = watch.state.take_events()
        steps = [event for event in (*events, *new) if event.kind == "step"]
        news = [event for event in (*events, *new) if event.kind != "step"]
        events.clear()
        events.extend([*news, *steps[-1:]])
        whole = run_status(watch.state, int(now_s * 1e9), events=events)
        await send(context.bus, shortened(whole, _LISTED))
        for every, kept_s in _KEPT_S.items():
            if now_s >= due_s[every]:
                due_s[every] = now_s + int(every.removesuffix("s")) - _PUBLISH_S / 2
                await send(context.bus, run_moment(whole, every), kept_s)
        await asyncio.sleep(_PUBLISH_S)
    await watch.close()


async def watch_for_stalls(context: Context, keeper: Keeper, watch: Watch, trained: Callable[[], int]) -> None:
    """Publish `stall.found` and `stall.ended` on the keeper's log until the actor is asked to stop.

    Args:
        trained: how many batches are known to be trained.
    """
    state = watch.state
    count, since, found = -1, time.monotonic(), True  # a supervisor before this one may have found something
    while not context.stop.is_set():
        await asyncio.sleep(_EXAMINE_S)
        if trained() != count:
            count, since = trained(), time.monotonic()
        if not found and time.monotonic() - since < _QUIET_S and not context.vitals.get(AWAY):
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
            context.log.warning(context.bus.tables.topic_for(decision).name, **msgspec.to_builtins(decision))
        if decisions:
            await keeper.append_until_stored(decisions)
