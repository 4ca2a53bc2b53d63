"""The verdict on a stalled run: the time of the stall, the reasons, and the contents of its queues."""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime

import msgspec
import psutil

from asyncrl.bus.address import BusAddress
from asyncrl.run.directory import RunFiles
from asyncrl.state.diagnose import diagnose
from asyncrl.state.watch import collect_state
from benchmarks.chaos.stage import Stage


class Stall(msgspec.Struct, kw_only=True):
    """The state of a run that did not advance within the limit, before its processes were stopped."""

    missing: str  # the event that did not arrive
    step: int | None  # newest trained
    since: str  # UTC, ISO 8601: the last such event, or the start
    seconds: float  # from `since` until the verdict
    findings: list[str]  # of the doctor
    queues: dict[str, dict[str, int]]  # by role
    stopped: list[str]  # processes in the state of SIGSTOP

    @property
    def text(self) -> str:
        """Return one line of text."""
        where = "before the first step" if self.step is None else f"at step {self.step}"
        since = datetime.fromisoformat(self.since)
        by = "; ".join(self.findings) or f"no finding; queues: {self._queues()}"
        stopped = f"; processes that are stopped: {', '.join(self.stopped)}" if self.stopped else ""
        return f"stalled {where}, no {self.missing} since {since:%H:%M:%S} UTC ({self.seconds:.0f} s): {by}{stopped}"

    def _queues(self) -> str:
        states = [
            f"{role} {queue['waiting']} waiting and {queue['under_way']} in progress"
            for role, queue in self.queues.items()
        ]
        return ", ".join(states) or "none"


async def verdict(stage: Stage, *, missing: str, step: int | None, quiet_s: float) -> Stall:
    """Inspect a stalled run and its processes, with the checks of the doctor.

    Args:
        missing: the event that did not arrive.
        quiet_s: seconds since the last such event.
    """
    address = RunFiles(stage.root).address
    findings, queues = [f"the run has no server; its last output: {stage.words.strip() or 'none'}"], {}
    if address.exists():
        state = await collect_state(BusAddress.read(address), stage.root.name, stage.root)
        findings = [f"{found.cause}: {found.object}: {found.evidence}" for found in diagnose(state)]
        queues = state.queues
    stopped = []
    for part in stage.parts():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if part.process.status() == psutil.STATUS_STOPPED:
                stopped.append(part.name)
    return Stall(
        missing=missing,
        step=step,
        since=datetime.fromtimestamp(time.time() - quiet_s, UTC).isoformat(timespec="seconds"),
        seconds=round(quiet_s, 1),
        findings=findings,
        queues=queues,
        stopped=stopped,
    )
