"""Striking: kill, freeze, or let somebody die at a named point."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from asyncrl.bus.errors import BusError
from asyncrl.bus.publish import say
from asyncrl.cli.chaos.processes import Part, parts
from asyncrl.cli.chaos.stage import Stage
from asyncrl.cli.chaos.targets import AT_THE_END, SERVER, SEVERAL, Target
from asyncrl.cli.chaos.witness import Witness
from asyncrl.crash import arm
from asyncrl.run.directory import RunFiles
from topics.actors import SCALE_REQUESTED, ScaleRequested
from topics.topic import TRAINING

_PATIENCE_S = 60.0  # for somebody to pass an armed point
_LOOK_S = 0.02  # an armed file is gone without a word
_POSTPONED = 12  # drawn targets that are not there or rest; when there are more, they are waited for
_IN_A_ROW = 5  # strikes at one role before it is left alone: its supervisor gives up at eight deaths in a row
_REST_S = 25.0  # longer than what a supervisor takes for a healthy life
_PASSED_AT_ITS_START = ("keeper.claiming", "keeper.claimed")


class Strike(msgspec.Struct):
    """Something that was done to the run."""

    role: str
    kind: str  # "kill", "freeze", "wake", or the name of a crash point
    names: list[str]  # of the processes; empty for those who died at a point
    at_s: float  # since striking began
    time_ns: int
    step: int | None  # newest trained then
    works_again_s: dict[str, float] = {}  # seconds by role, once it worked again


class Striker:
    """Strikes one drawn target after another, and notes what came of it."""

    def __init__(
        self,
        targets: Iterator[Target],
        stage: Stage,
        witness: Witness,
        *,
        insist: bool,
        dice: random.Random,
        tell: Callable[[Strike], None],
    ) -> None:
        """
        Args:
            insist: whether a point that nobody passed is armed again later.
        """
        self.strikes: list[Strike] = []
        self.unreached: Counter[str] = Counter()  # targets whose point nobody passed while it was armed
        self._targets = targets
        self._folder = stage.crash_folder
        self._witness = witness
        cast = RunFiles(stage.root).read_cast()
        self._wake_s = cast.rollout.lease_s + 1.0  # a second more than a lease
        self._workers = cast.rollout.workers
        self._insist = insist
        self._dice = dice
        self._tell = tell
        self._began_ns = time.time_ns()
        self._rows: dict[str, tuple[int, float]] = {}  # strikes in a row and when the last one was, by role
        self._postponed: list[Target] = []  # drawn while they were not there, or rested
        self._seen = {SEVERAL}  # roles that somebody plays in this run
        self._armed: dict[Path, asyncio.Task[None]] = {}
        self._last: Counter[Target] = Counter()  # how often those points are to be passed that end a run
        self._tasks: set[asyncio.Task[None]] = set()
        self.recovering: dict[asyncio.Task[None], tuple[Strike, str]] = {}  # roles that do not work again yet
        self._settling = False

    async def strike_next(self) -> bool:
        """Strike one target that is there and not resting; False when no more will be drawn."""
        living = parts(self._folder)
        self._seen |= {part.role for part in living}
        for target in self._postponed:
            if await self._strike(target, living):
                self._postponed.remove(target)
                return True
        while len(self._postponed) < _POSTPONED:
            drawn = next(self._targets, None)
            if drawn is None:
                return bool(self._postponed)
            if drawn.role not in self._seen:
                continue  # nobody plays it in this cast
            if await self._strike(drawn, living):
                break
            self._postponed.append(drawn)
        return True

    async def settle(self) -> None:
        """Disarm what nobody passed, but for the points that end a run; nothing is struck from here on."""
        self._settling = True
        tasks = [task for file, task in self._armed.items() if not file.name.startswith(AT_THE_END)]
        await asyncio.gather(*tasks)

    async def close(self) -> None:
        """End what still waits."""
        for task in [*self._tasks, *self._armed.values()]:
            task.cancel()

    def unrecovered(self, limit_s: float) -> list[str]:
        """Who was struck more than `limit_s` ago and does not work again yet."""
        found = []
        for strike, role in self.recovering.values():
            ago_s = (time.time_ns() - strike.time_ns) / 1e9
            if ago_s > limit_s:
                what = f"{strike.kind} at {strike.at_s:.1f} s, step {strike.step}"
                found.append(f"{role}: {what}: does not work again after {ago_s:.0f} s")
        return found

    async def _strike(self, target: Target, living: Sequence[Part]) -> bool:
        """Strike a target; False where it is not there now, or rests."""
        if self._rests(target):
            return False
        if target.family == "crash":
            return self._arm(target, living)
        chosen = await self._choose(target.role, living)
        if not chosen:
            return False
        for part in chosen:
            with contextlib.suppress(psutil.NoSuchProcess):  # it was faster
                part.process.send_signal(signal.SIGKILL if target.kind == "kill" else signal.SIGSTOP)
        self._note(target, chosen)
        if target.kind == "wake":
            self._spawn(self._wake(chosen[0]))
        return True

    async def _choose(self, role: str, living: Sequence[Part]) -> list[Part]:
        if role == SEVERAL:
            others = [part for part in living if part.role != "up"]
            return self._dice.sample(others, self._dice.randint(2, 4)) if len(others) > 4 else []
        fitting = [part for part in living if part.role == role]
        if role == "nats" and len(fitting) > 1:
            leader = await self._leader()
            fitting = [part for part in fitting if part.name == leader] or fitting
        return [self._dice.choice(fitting)] if fitting else []

    async def _leader(self) -> str:
        """Name of the server that leads the learner's log."""
        bus = self._witness.bus
        with contextlib.suppress(BusError):
            info = await bus.api(f"STREAM.INFO.{TRAINING.full_name(bus.run)}")
            return str(info["cluster"].get("leader", ""))
        return ""

    async def _wake(self, part: Part) -> None:
        await asyncio.sleep(self._wake_s)
        with contextlib.suppress(psutil.NoSuchProcess):  # it was replaced meanwhile
            part.process.resume()

    def _arm(self, target: Target, living: Sequence[Part]) -> bool:
        """Arm a point, and bring somebody to pass it where that takes an occasion."""
        file = self._folder / f"{target.kind}@{target.role}"
        if target.kind in AT_THE_END:
            self._last[target] = min(_IN_A_ROW, self._last[target] + 1)
        if file in self._armed:
            return False
        arm(self._folder, target.kind, target.role)
        self._armed[file] = asyncio.create_task(self._follow(target, file))
        occasion = "recorder" if target.kind == "actor.started" else target.role
        if target.kind in (*_PASSED_AT_ITS_START, "actor.started"):
            for part in [part for part in living if part.role == occasion][:1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    part.process.kill()
                self._note(Target(occasion, "kill"), [part])
        elif target.kind == "fleet.scaled":
            self._spawn(self._scale())
        return True

    async def _follow(self, target: Target, file: Path) -> None:
        """Watch an armed point until somebody has passed it, or nobody has for long enough."""
        until = time.monotonic() + (math.inf if target.kind in AT_THE_END else _PATIENCE_S)
        while time.monotonic() < until and not _passed(file):
            await asyncio.sleep(_LOOK_S)
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
            self._postponed += [target] * self._insist

    async def _scale(self) -> None:
        """Ask for one rollout worker more, or for that one to leave: an occasion to say `fleet.scaled`."""
        wanted = self._workers + (self._witness.fleet.get("rollout", 0) <= self._workers)
        with contextlib.suppress(BusError):  # then the point is not reached
            request = ScaleRequested({"rollout": wanted})
            await say(self._witness.bus, SCALE_REQUESTED, request, id=str(time.time_ns()))

    def _note(self, target: Target, struck: Sequence[Part]) -> None:
        now, since = time.time_ns(), time.monotonic()
        strike = Strike(
            role=target.role,
            kind=target.kind,
            names=[part.name for part in struck],
            at_s=round((now - self._began_ns) / 1e9, 2),
            time_ns=now,
            step=self._witness.step,
        )
        self.strikes.append(strike)
        for role in {part.role for part in struck} or {target.role}:
            count, last = self._rows.get(_supervised(role), (0, 0.0))
            self._rows[_supervised(role)] = (count + 1 if since - last < _REST_S else 1, since)
            if target.kind != "wake":
                task = self._spawn(self._until_it_works(strike, role))
                self.recovering[task] = strike, role
                task.add_done_callback(self.recovering.pop)
        self._tell(strike)

    async def _until_it_works(self, strike: Strike, role: str) -> None:
        worked_ns = await self._witness.works_again(role, strike.time_ns)
        strike.works_again_s[role] = round((worked_ns - strike.time_ns) / 1e9, 2)

    def _rests(self, target: Target) -> bool:
        count, last = self._rows.get(_supervised(target.role), (0, 0.0))
        return count >= _IN_A_ROW and time.monotonic() - last < _REST_S

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _passed(file: Path, *, disarm: bool = False) -> bool:
    """Whether an armed point has taken somebody."""
    try:
        file.unlink() if disarm else file.stat()
    except FileNotFoundError:
        return True
    return False


def _supervised(role: str) -> str:
    return "engine" if role == SERVER else role
