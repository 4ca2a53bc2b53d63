"""Alerts: the conditions of the config on the metrics of steps, published once each and acted on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec

from actors.runtime.actor import Context
from actors.runtime.keeper import Keeper
from actors.supervisor.fold import SupervisorFold
from asyncrl.background import first_of
from asyncrl.bus.publish import publish
from asyncrl.config.alert_settings import SHIPPED, STALL, AlertSettings
from asyncrl.errors import UNREADABLE, AsyncRLError
from asyncrl.state.alert_rules import AlertRule
from asyncrl.state.open_alerts import PAUSED
from asyncrl.state.watch import Watch
from asyncrl.telemetry.metric_names import MetricRow
from topics.actors import StopRequested
from topics.alerts import AlertEnded, AlertRaised

_LOOK_S = 0.5  # between two looks at the metrics
_STALLED_S = 10.0  # without a step, after which an open cause is a stall
_LIMIT_S = 30.0  # for a webhook, and for a command
_ANSWER_BYTES = 4096  # of a webhook


class StepRows:
    """Rows of RL steps in a file that grows. A recorder that starts again cuts the file and writes the same rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0  # bytes that were read
        self._step = 0  # newest that was returned

    def new(self) -> Iterator[MetricRow]:
        """Return the rows that were added, each step once."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset if self._offset <= self._path.stat().st_size else 0)
            self._offset = file.tell()
            for line in file:
                if not line.endswith(b"\n"):
                    return
                try:
                    row = msgspec.json.decode(line, type=dict[str, Any])
                except UNREADABLE:  # the file was cut, and the offset is inside a row
                    self._offset = 0
                    return
                self._offset += len(line)
                if row.get("event") == "step" and row.get("stage") == "rl" and row["step"] > self._step:
                    self._step = row["step"]
                    yield MetricRow(row)


class Alerts:
    """The alerts of a run: those of its config, and the shipped ones that it does not switch off or name itself."""

    def __init__(self, context: Context, keeper: Keeper, fold: SupervisorFold, watch: Watch) -> None:
        self._context, self._keeper, self._fold, self._watch = context, keeper, fold, watch
        settings, named = context.config.alert, {one.name for one in context.config.alert}
        wanted = [name for name in context.config.shipped_alerts if name not in named]
        shipped = [AlertSettings(when=SHIPPED[name], name=name) for name in wanted if name != STALL]
        self._rules = [AlertRule(one) for one in (*settings, *shipped)]
        self._stall = AlertSettings(when=f"{STALL} missing", name=STALL) if STALL in wanted else None
        self._rows = StepRows(context.files.metrics)
        self._trained, self._since = -1, time.monotonic()  # batches, and since when

    async def watch(self) -> None:
        """Publish `alert.raised` and `alert.ended` on the keeper's log until the actor is asked to stop.

        Rules are fed with all rows again after a start. Changes up to the newest published step of an alert are known.
        """
        async with asyncio.TaskGroup() as deliveries:
            while not self._context.stop.is_set():
                for row in await asyncio.to_thread(lambda: list(self._rows.new())):
                    for rule in self._rules:
                        change = rule.step(row)
                        if change is not None and change.step > self._fold.state.alerts.get(change.alert, 0):
                            deliveries.create_task(await self._publish(rule.settings, self._decided(rule, change)))
                if self._stall is not None and (stalled := self._stalled()) is not None:
                    deliveries.create_task(await self._publish(self._stall, stalled))
                await first_of(self._context.stop.wait(), timeout_s=_LOOK_S)  # no topic announces a row

    def _decided(self, rule: AlertRule, change: AlertRaised | AlertEnded) -> AlertRaised | AlertEnded:
        """Return a change with the checkpoint that a rollback goes back to; without one the run stops."""
        if not isinstance(change, AlertRaised) or change.do != "rollback":
            return change
        state, first = self._fold.state, change.step - rule.looked_back
        good = [saved.step for saved in state.checkpoints if saved.step < first]
        if not good or state.rollbacks.get(change.alert, 0) >= rule.settings.max_rollbacks:
            return msgspec.structs.replace(change, do="stop")
        return msgspec.structs.replace(change, checkpoint=max(good))

    def _stalled(self) -> AlertRaised | AlertEnded | None:
        """Return what changes for the shipped rule about causes that keep the run from advancing."""
        trained, now = self._fold.state.trained, time.monotonic()
        if trained != self._trained:
            self._trained, self._since = trained, now
        causes = [stall for stall in self._watch.state.stalls.values() if stall.cause != PAUSED]
        is_open, step = STALL in self._fold.state.open_alerts, self._watch.state.trained
        if causes and not is_open and now - self._since > _STALLED_S:
            return AlertRaised(STALL, f"{causes[0].cause}: {causes[0].object}", step, None, "notify")
        return AlertEnded(STALL, step, None) if is_open and not causes else None

    async def _publish(self, settings: AlertSettings, change: AlertRaised | AlertEnded) -> Coroutine[Any, Any, None]:
        """Store a change; returns what follows from it."""
        await self._keeper.append_until_stored([change])
        topic = self._context.bus.tables.topic_for(change).name
        self._context.log.warning(topic, **msgspec.to_builtins(change))
        if isinstance(change, AlertRaised) and change.do == "stop":
            why = f"; it asks for a rollback, {self._no_rollback(settings)}" if settings.do == "rollback" else ""
            await publish(
                self._context.bus, StopRequested(f"alert {change.alert} was raised at step {change.step}{why}")
            )
        return _delivered(self._context, settings, change)

    def _no_rollback(self, settings: AlertSettings) -> str:
        spent = self._fold.state.rollbacks.get(settings.name, 0) >= settings.max_rollbacks
        return f"and all {settings.max_rollbacks} were made" if spent else "and no checkpoint is from before that"


async def _delivered(context: Context, settings: AlertSettings, change: AlertRaised | AlertEnded) -> None:
    """Send a change to the webhook and the command; a failure is logged."""
    topic = context.bus.tables.topic_for(change).name
    body = msgspec.json.encode({"run": context.bus.run, "topic": topic, **msgspec.to_builtins(change)})
    try:
        if settings.webhook:
            await _post(settings.webhook, body)
        if settings.command:
            await _call(settings.command, body)
    except (AsyncRLError, OSError, TimeoutError) as error:
        context.log.warning("alert not delivered", alert=change.alert, reason=f"{type(error).__name__}: {error}")


async def _post(url: str, body: bytes) -> None:
    """Send the message to a web server.

    Raises:
        AsyncRLError, OSError, TimeoutError: it did not take the message.
    """
    import aiohttp  # which few runs need

    from asyncrl.http_calls import answered, open_session, post

    try:
        async with open_session() as session:
            await answered(lambda: post(session, url, body, _ANSWER_BYTES), _LIMIT_S)
    except aiohttp.ClientError as error:
        raise AsyncRLError(f"{url}: {type(error).__name__}: {error}") from error


async def _call(command: list[str], body: bytes) -> None:
    """Call a program with the message at its standard input.

    Raises:
        AsyncRLError: it failed.
        TimeoutError: it took too long, and was killed.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
    try:
        async with asyncio.timeout(_LIMIT_S):
            output, _ = await process.communicate(body)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    if process.returncode:
        words = output[-_ANSWER_BYTES:].decode(errors="replace").strip()
        raise AsyncRLError(f"{command[0]} ended with {process.returncode}: {words}")
