"""A campaign: inject faults into a run until it ends, or give a verdict when it stalls."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.run.directory import RunFiles
from asyncrl.run.fault_injection import Target, drawn
from benchmarks.chaos.injections import Injection, Injector
from benchmarks.chaos.stage import Stage
from benchmarks.chaos.stall import Stall, verdict
from benchmarks.chaos.targets import each_point
from benchmarks.chaos.witness import Witness

_REACH_S = 5.0  # limit for an answer of the run's server
_TICK_S = 0.2
_BEFORE_ANY = -(1 << 31)  # less than any step: the steps of the warm-up are zero or negative
_MARGIN = 0.05  # share of the steps that the run finishes undisturbed
_STEP_LIMITS = 3.0  # a run with grades but without a trained batch counts as stalled after this many limits


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a campaign."""

    targets: list[Target]
    seed: int
    seconds: float  # from the first injection to the last, at most
    every_s: float
    kills: int  # 0: no limit
    points_each: int
    after_recovery: bool  # inject only while the run trains and has recovered from the last injection
    stall_s: float  # a run that does not advance for this long is stalled

    @classmethod
    def of(cls, arguments: Namespace, targets: list[Target]) -> Plan:
        """The plan that a command line asks for."""
        return cls(
            targets=targets,
            seed=arguments.seed,
            seconds=arguments.seconds,
            every_s=arguments.every,
            kills=arguments.kills,
            points_each=arguments.points_each,
            after_recovery=arguments.after_recovery,
            stall_s=arguments.stall,
        )


class Campaign:
    """One run under chaos."""

    def __init__(
        self, plan: Plan, stage: Stage, running: asyncio.Task[int], report: Callable[[Injection], None]
    ) -> None:
        """
        Args:
            running: ends with the run.
        """
        self.witness: Witness | None = None  # once the run has its topics
        self.injector: Injector | None = None  # once it has trained a batch
        self.unrecovered: list[str] = []  # roles that did not recover within the limit, or before the run stalled
        self._plan, self._stage, self._running, self._report = plan, stage, running, report
        self._began_s = time.monotonic()

    def progress(self) -> str:
        """Return the progress of the run: `step 20 of 130; faults so far: 6`."""
        witness = self.witness
        started = witness is not None and witness.step is not None
        place = f"step {witness.step:,} of {witness.steps:,}" if witness is not None and started else "the run starts"
        return f"{place}; faults so far: {len(self.injector.injections) if self.injector is not None else 0}"

    async def run(self) -> Stall | None:
        """Inject faults until the run ends; return the verdict if the run stalls, and leave its processes running."""
        acting = asyncio.create_task(self._act())
        watching = asyncio.create_task(self._stands_still())
        try:
            await asyncio.wait({acting, watching}, return_when=asyncio.FIRST_COMPLETED)
            if acting.done():
                acting.result()
                return None
            missing, quiet_s = watching.result()
            step = self.witness.step if self.witness is not None else None
            return await verdict(self._stage, missing=missing, step=step, quiet_s=quiet_s)
        finally:
            for task in (acting, watching):
                task.cancel()
            await asyncio.wait({acting, watching})
            await self._close()

    async def _act(self) -> None:
        """Wait for the first trained batch, inject faults, and wait for the run's end."""
        witness = self.witness = await self._connected()
        if witness is not None:
            trained = witness.trained_after(_BEFORE_ANY)
            await asyncio.wait({trained, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if witness is not None and not self._running.done():
            await self._inject(witness)
        await asyncio.wait({self._running})

    async def _connected(self) -> Witness | None:
        """Start a witness as soon as the run's topics exist; None if the run ends first."""
        address = RunFiles(self._stage.root).address
        while not self._running.done():
            if address.exists():
                with contextlib.suppress(BusError):
                    name = self._stage.root.name
                    bus = await Bus.connect(BusAddress.read(address), name, name="chaos", deadline_s=_REACH_S)
                    witness = Witness(bus)
                    try:
                        await witness.start()
                        return witness
                    except BusError:  # the streams are being made
                        await witness.close()
                        await bus.close()
            await self._ended_within(_TICK_S)
        return None

    async def _inject(self, witness: Witness) -> None:
        """Inject at a steady rate until the plan is complete or the run is about to end."""
        plan, injector = self._plan, self._make_injector(witness)
        last = witness.steps - max(2, int(_MARGIN * witness.steps))
        until = time.monotonic() + plan.seconds
        while not self._running.done() and time.monotonic() < until and (witness.step or 0) < last:
            if plan.kills and len(injector.injections) >= plan.kills:
                break
            if plan.after_recovery and not await self._recovered(witness, injector):
                break
            if not await injector.inject_next():
                break
            await self._ended_within(plan.every_s)
        await injector.settle()

    def _make_injector(self, witness: Witness) -> Injector:
        plan, seed = self._plan, self._plan.seed
        self.injector = Injector(
            each_point(plan.targets, plan.points_each, seed) if plan.points_each else drawn(plan.targets, seed),
            self._stage,
            witness,
            rearm=plan.points_each > 0,
            dice=random.Random(f"{seed} target"),
            report=self._report,
        )
        return self.injector

    async def _recovered(self, witness: Witness, injector: Injector) -> bool:
        """Wait until an RL step was trained since the last injection and all injected roles have recovered."""
        step = max([0, *(injection.step or 0 for injection in injector.injections)])
        waits: list[asyncio.Future[Any]] = [witness.trained_after(step), *injector.recovering]
        done = asyncio.ensure_future(asyncio.wait(waits))
        await asyncio.wait({done, self._running}, timeout=self._plan.stall_s, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            done.cancel()
            return False
        return True

    async def _stands_still(self) -> tuple[str, float]:
        """Wait until the run stops advancing; return the missing event and the seconds since the last one."""
        while True:
            now, limit_s = time.monotonic(), self._plan.stall_s
            advanced_s = self.witness.advanced_s if self.witness is not None else 0.0
            trained_s = self.witness.trained_s if self.witness is not None else 0.0
            quiet_s, untrained_s = (now - max(self._began_s, last_s) for last_s in (advanced_s, trained_s))
            if quiet_s >= limit_s:
                return "step, result or grade", quiet_s
            if untrained_s >= _STEP_LIMITS * limit_s:
                return "step", untrained_s
            await asyncio.sleep(min(limit_s - quiet_s, _STEP_LIMITS * limit_s - untrained_s))

    async def _ended_within(self, seconds: float) -> None:
        await asyncio.wait({self._running}, timeout=seconds)

    async def _close(self) -> None:
        if self.injector is not None:
            self.unrecovered = self.injector.unrecovered(self._plan.stall_s if self._running.done() else 0.0)
            await self.injector.close()
        if self.witness is not None:
            await self.witness.close()
            await self.witness.bus.close()
