"""Fault injection: kill, freeze, or let a process die at a named point."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.bus.errors import BusError
from asyncrl.bus.publish import publish
from asyncrl.crash import arm
from asyncrl.run.directory import RunFiles
from asyncrl.run.fault_injection import IN_A_ROW, NATS, SEVERAL, Part, Rests, Target, choose, inject, resume
from benchmarks.chaos.stage import Stage
from benchmarks.chaos.targets import AT_THE_END
from benchmarks.chaos.witness import Witness
from topics.actors import ScaleRequested
from topics.topic import TRAINING

_PATIENCE_S = 60.0  # for a process to pass an armed point
_POLL_S = 0.02  # no event announces that an armed file is gone
_POSTPONED = 12  # drawn targets that do not run or rest; with more of them, wait
_PASSED_AT_ITS_START = ("keeper.claiming", "keeper.claimed")


class Injection(msgspec.Struct):
    """One fault that was injected into the run."""

    role: str
    kind: str  # "kill", "freeze", "wake", or the name of a crash point
    names: list[str]  # of the processes; empty for processes that died at a point
    at_s: float  # since striking began
    time_ns: int
    step: int | None  # newest trained step at that time
    works_again_s: dict[str, float] = {}  # seconds by role, once it worked again


class Injector:
    """Injects faults at one drawn target after another, and records the outcome."""

    def __init__(
        self,
        targets: Iterator[Target],
        stage: Stage,
        witness: Witness,
        *,
        rearm: bool,
        dice: random.Random,
        report: Callable[[Injection], None],
    ) -> None:
        """
        Args:
            rearm: whether to arm a point again later when no process passed it.
        """
        self.injections: list[Injection] = []
        self.unreached: Counter[str] = Counter()  # targets whose point no process passed while it was armed
        self._targets = targets
        self._stage = stage
        self._folder = stage.crash_folder
        self._witness = witness
        config = RunFiles(stage.root).read_config()
        self._wake_s = config.workers.lease_s + 1.0  # a second more than a lease
        self._workers = config.rollout.workers
        self._rearm = rearm
        self._dice = dice
        self._report = report
        self._began_ns = time.time_ns()
        self._rests = Rests(stage.root)
        self._postponed: list[Target] = []  # drawn while they did not run, or rested
        self._seen = {SEVERAL}  # roles of this run
        self._armed: dict[Path, asyncio.Task[None]] = {}
        self._last: Counter[Target] = Counter()  # how often points that end a run are to be passed
        self._tasks: set[asyncio.Task[None]] = set()
        self.recovering: dict[asyncio.Task[None], tuple[Injection, str]] = {}  # roles that have not recovered yet
        self._settling = False

    async def inject_next(self) -> bool:
        """Inject a fault at one target that runs and is not resting; False when no target is left."""
        living = self._stage.parts()
        self._seen |= {part.role for part in living}
        for target in self._postponed:
            if await self._inject(target, living):
                self._postponed.remove(target)
                return True
        while len(self._postponed) < _POSTPONED:
            drawn = next(self._targets, None)
            if drawn is None:
                return bool(self._postponed)
            if drawn.role not in self._seen:
                continue  # this config has no such role
            if await self._inject(drawn, living):
                break
            self._postponed.append(drawn)
        return True

    async def settle(self) -> None:
        """Disarm points that no process passed, except points that end a run; inject no fault from now on."""
        self._settling = True
        tasks = [task for file, task in self._armed.items() if not file.name.startswith(AT_THE_END)]
        await asyncio.gather(*tasks)

    async def close(self) -> None:
        """Cancel all pending tasks."""
        for task in [*self._tasks, *self._armed.values()]:
            task.cancel()

    def unrecovered(self, limit_s: float) -> list[str]:
        """Return the roles that had an injection more than `limit_s` ago and have not recovered."""
        found = []
        for injection, role in self.recovering.values():
            ago_s = (time.time_ns() - injection.time_ns) / 1e9
            if ago_s > limit_s:
                what = f"{injection.kind} at {injection.at_s:.1f} s, step {injection.step}"
                found.append(f"{role}: {what}: does not work again after {ago_s:.0f} s")
        return found

    async def _inject(self, target: Target, living: Sequence[Part]) -> bool:
        """Inject a fault at a target; False if the target does not run now, or rests."""
        if self._rests.has(target.role):
            return False
        if target.family == "crash":
            return self._arm(target, living)
        chosen = await self._choose(target.role, living)
        if not chosen:
            return False
        inject(target.kind, chosen)
        self._note(target, chosen)
        if target.kind == "wake":
            self._spawn(self._wake(chosen[0]))
        return True

    async def _choose(self, role: str, living: Sequence[Part]) -> list[Part]:
        if role == SEVERAL:
            living = [part for part in living if part.role != "up"]
        elif role == NATS and self._witness.bus.clustered:
            leader = await self._leader()
            living = [part for part in living if part.name == leader] or living
        return choose(role, living, self._dice)

    async def _leader(self) -> str:
        """Name of the server that leads the learner's log."""
        bus = self._witness.bus
        with contextlib.suppress(BusError):
            info = await bus.api(f"STREAM.INFO.{TRAINING.full_name(bus.run)}")
            return str(info["cluster"].get("leader", ""))
        return ""

    async def _wake(self, part: Part) -> None:
        await asyncio.sleep(self._wake_s)
        resume(part)

    def _arm(self, target: Target, living: Sequence[Part]) -> bool:
        """Arm a point; cause a process to pass it if the point needs an occasion."""
        file = self._folder / f"{target.kind}@{target.role}"
        if target.kind in AT_THE_END:
            self._last[target] = min(IN_A_ROW, self._last[target] + 1)
        if file in self._armed:
            return False
        arm(self._folder, target.kind, target.role)
        self._armed[file] = asyncio.create_task(self._follow(target, file))
        occasion = "recorder" if target.kind == "actor.started" else target.role
        if target.kind in (*_PASSED_AT_ITS_START, "actor.started"):
            for part in [part for part in living if part.role == occasion][:1]:
                inject("kill", [part])
                self._note(Target(occasion, "kill"), [part])
        elif target.kind == "fleet.scaled":
            self._spawn(self._scale())
        return True

    async def _follow(self, target: Target, file: Path) -> None:
        """Watch an armed point until a process has passed it, or the time limit ends."""
        until = time.monotonic() + (math.inf if target.kind in AT_THE_END else _PATIENCE_S)
        while time.monotonic() < until and not _passed(file):
            await asyncio.sleep(_POLL_S)
            if self._settling and until < math.inf:
                break
        del self._armed[file]
        if _passed(file, disarm=True):
            self._note(target, [])
            self._last[target] -= 1
            if self._last[target] > 0:
                self._armed[arm(self._folder, target.kind, target.role)] = self._spawn(self._follow(target, file))
        else:
            self.unreached[str(target)] += 1
            self._postponed += [target] * self._rearm

    async def _scale(self) -> None:
        """Request one rollout worker more or less, so that `fleet.scaled` is published."""
        wanted = self._workers + (self._witness.fleet.get("rollout", 0) <= self._workers)
        with contextlib.suppress(BusError):  # then the point is not reached
            request = ScaleRequested({"rollout": wanted})
            await publish(self._witness.bus, request)

    def _note(self, target: Target, affected: Sequence[Part]) -> None:
        now = time.time_ns()
        injection = Injection(
            role=target.role,
            kind=target.kind,
            names=[part.name for part in affected],
            at_s=round((now - self._began_ns) / 1e9, 2),
            time_ns=now,
            step=self._witness.step,
        )
        self.injections.append(injection)
        for role in {part.role for part in affected} or {target.role}:
            self._rests.note(role)
            if target.kind != "wake":
                task = self._spawn(self._until_it_works(injection, role))
                self.recovering[task] = injection, role
                task.add_done_callback(self.recovering.pop)
        self._report(injection)

    async def _until_it_works(self, injection: Injection, role: str) -> None:
        worked_ns = await self._witness.works_again(role, injection.time_ns, killed=bool(injection.names))
        injection.works_again_s[role] = round((worked_ns - injection.time_ns) / 1e9, 2)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _passed(file: Path, *, disarm: bool = False) -> bool:
    """Return whether an armed point has ended a process."""
    try:
        file.unlink() if disarm else file.stat()
    except FileNotFoundError:
        return True
    return False
