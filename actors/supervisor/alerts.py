"""Alerts: the conditions of the config on the metrics of steps, published once each and acted on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from actors.runtime.actor import Context
from actors.runtime.keeper import Keeper
from actors.supervisor.fold import SupervisorFold
from asyncrl.background import first_of
from asyncrl.bus.publish import publish
from asyncrl.config.alert_settings import AlertSettings
from asyncrl.errors import UNREADABLE, AsyncRLError
from asyncrl.state.alert_rules import AlertRule
from asyncrl.telemetry.metric_names import MetricRow
from topics.actors import StopRequested
from topics.alerts import AlertEnded, AlertRaised

_LOOK_S = 0.5  # between two looks at the metrics
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


async def watch_alerts(context: Context, keeper: Keeper, fold: SupervisorFold) -> None:
    """Publish `alert.raised` and `alert.ended` on the keeper's log until the actor is asked to stop.

    Rules are fed with all rows again after a start. Changes up to the newest published step of an alert are known.
    """
    if not context.config.alert:
        return
    rules, rows = [AlertRule(settings) for settings in context.config.alert], StepRows(context.files.metrics)
    async with asyncio.TaskGroup() as deliveries:
        while not context.stop.is_set():
            for row in await asyncio.to_thread(lambda: list(rows.new())):
                changes = [(rule.settings, change) for rule in rules if (change := rule.step(row)) is not None]
                for settings, change in changes:
                    if change.step > fold.state.alerts.get(change.alert, 0):
                        await keeper.append_until_stored([change])
                        context.log.warning(context.bus.tables.topic_for(change).name, **msgspec.to_builtins(change))
                        deliveries.create_task(_act(context, settings, change))
            await first_of(context.stop.wait(), timeout_s=_LOOK_S)  # no topic announces a row


async def _act(context: Context, settings: AlertSettings, change: AlertRaised | AlertEnded) -> None:
    """Do what follows from a change; a failure is logged."""
    topic = context.bus.tables.topic_for(change).name
    body = msgspec.json.encode({"run": context.bus.run, "topic": topic, **msgspec.to_builtins(change)})
    if settings.do == "stop" and isinstance(change, AlertRaised):
        await publish(context.bus, StopRequested(f"alert {change.alert} was raised at step {change.step}"))
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
