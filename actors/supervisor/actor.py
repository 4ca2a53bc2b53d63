"""The supervisor: starts the actors of a run, watches them, restarts and scales them, and ends the run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Literal

import msgspec

from actors.runtime.actor import ActorFault, Context
from actors.runtime.keeper import Keeper
from actors.supervisor.alerts import Alerts
from actors.supervisor.autoscaler import autoscale
from actors.supervisor.channel import Decision, absent
from actors.supervisor.fold import SupervisorFold, SupervisorState
from actors.supervisor.log_sizes import bound_logs
from actors.supervisor.observer import follow_run, publish_state, watch_for_stalls
from actors.supervisor.retention import retain
from actors.supervisor.starts import Starts
from actors.supervisor.stored_version import StoredVersion
from actors.supervisor.sweeper import is_stored
from actors.supervisor.trimmer import Trimmer
from asyncrl.background import first_of
from asyncrl.bus.liveness import Liveness
from asyncrl.bus.publish import publish
from asyncrl.config.engine_settings import Capability
from asyncrl.config.pools import lent_pools
from asyncrl.config.settings import Config
from asyncrl.config.worker_pools import pool_sizes
from asyncrl.crash import crash_point
from asyncrl.errors import AsyncRLError
from asyncrl.process import DENIED, FATAL, ChildProcess, RestartPolicy, cpu_wait_s
from asyncrl.run.gateway_port import follows, inherited_socket, with_gateway_socket
from asyncrl.run.placement import LOST, Job, NoRoom, Placed, actor_job
from topics.actors import MOST_PROCESSES, ActorStopped, FleetScaled
from topics.gpu_handoff import CardLeft
from topics.promotions import CanaryEnded, PromotionRefused, WeightsCanaried, WeightsPromoted
from topics.roles import ROLES, SUPERVISOR, Role, number_in_pool, role_of
from topics.topic import FLEET

_STOP_S = 10.0  # for an actor to leave by itself
_SUMMARY_S = 40.0  # for the recorder, which reads the logs to their end then and draws the plot: seconds of a free core
_REPLACED = -257  # no exit code: a process waits for the next one, and ends by itself
_NEXT_S = 60.0  # for a replaced process to end, in addition to the time that its replies have
_LAST_EVAL_S = 60.0  # for the last evaluation after training has finished


def first_fleet(config: Config, rows: Sequence[Role] = ROLES) -> dict[str, int]:
    """Return how many processes run each pool at the start, in the order of their starts.

    A pool is a role, one of several groups of engines (`engine-large`), or workers of some tasks (`rollout-code`).
    """
    roles = sorted((role for role in rows if role.name != SUPERVISOR), key=lambda role: not role.slow)
    fleet: dict[str, int] = {}
    alone = {*config.only, "recorder"} | ({"router"} if "engine" in config.only else set())
    for role in roles:
        if config.only and role.name not in alone:
            fleet[role.name] = 0
        elif role.name == "engine":
            fleet |= {pool: group.servers for pool, group in config.engine.pools.items()}
        elif role.setting:
            fleet[role.name] = int(attrgetter(role.setting)(config))
            fleet |= {pool: count for pool, count in pool_sizes(config).items() if role_of(pool) == role.name}
        else:
            fleet[role.name] = 1 + config.supervision.standbys if role.kind == "keeper" else role.processes
    return fleet | dict.fromkeys(lent_pools(config), 0)


class _Child:
    """A process that runs a role, and how often it died."""

    def __init__(self, role: str, actor_id: str, restarts: RestartPolicy) -> None:
        self.role = role
        self.actor_id = actor_id
        self.process: Placed | None = None
        self.started = asyncio.Event()  # its process has published its start
        self.restarts = restarts
        self.achieved = 0  # by the run when it died last, see `SupervisorFold`
        self.leaving = False
        self.replaced = asyncio.Event()  # its process waits for the next one
        self.before: dict[asyncio.Task[None], Placed] = {}  # processes that were replaced, and have not ended
        self.task: asyncio.Task[None] | None = None


async def main(context: Context) -> None:
    """Run the actors of the config until the run ends."""
    await Supervisor(context).run()


class Supervisor:
    """Starts and watches one process per actor."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.fold = SupervisorFold(context.config, self._on_started, self._on_leaving, context.bus.tables)
        self._gateway_socket = inherited_socket()
        self._children: dict[str, _Child] = {}
        self._starts = Starts()
        self._lingering: set[str] = set()  # actors that published their end and have time to exit
        self._liveness = Liveness(
            context.bus,
            context.config.supervision.silence_s,
            self._on_silent,
            on_starved=lambda actor_id: context.log.warning(
                "actor is silent: starved, waits for a CPU", actor=actor_id
            ),
            waited_s=self._waited_s,
        )
        self._failure = ""
        self._reconciled: list[str] = []  # actors that were wanted when last they were started and dismissed
        self.keeper = Keeper(context, FLEET, self.fold)

    @property
    def _state(self) -> SupervisorState:
        return self.fold.state

    async def run(self) -> None:
        """Start all actors, then follow requests until the run ends."""
        await self.keeper.start()
        self.context.tasks.start(self._liveness.watch())
        self.context.tasks.start(self._observe())
        trimmer = Trimmer(self.context, self.keeper, self.fold)
        trimming = self.context.tasks.start(trimmer.run())
        retaining = self.context.tasks.start(retain(self.context))
        self.context.tasks.start(bound_logs(self.context))
        first, wanted = first_fleet(self.context.config, self.context.bus.tables.roles), self._state.wanted
        gateways = first.get("gateway", 0)
        if not wanted:
            await self._scale(FleetScaled(first, by="start"))
        elif wanted.get("gateway", 0) != gateways:  # the run resumes with another number
            await self._scale(FleetScaled({"gateway": gateways}, by="start"))
        if self.context.stop.is_set() or self._state.stopping or (self.fold.finished and not self._state.evals_open):
            self._begin("recorder-1")  # a supervisor died while the run ended: the summary may be missing
        finished_at, settings = 0.0, self.context.config.eval
        # Engines that serve evaluations alone take one after the other.
        last_s = settings.deadline_s if settings.engines else _LAST_EVAL_S
        while not (self.context.stop.is_set() or self._state.stopping):
            scaled = self._state.scaling.decide(self._state.wanted, self._most)
            if scaled is not None:
                await self._scale(scaled)
                continue
            if self._names != self._reconciled:
                self._reconcile()
                continue
            decision = self._decided()
            if decision is not None:
                await self._move(decision)
                continue
            if self.fold.finished:
                finished_at = finished_at or self.keeper.now()
                if not self._state.evals_open or self.keeper.now() > finished_at + last_s:
                    break
            await self.keeper.changes(until=finished_at + last_s if finished_at else None)
        await self._stop_all()
        if not self._failure:
            trimmer.end()
            await asyncio.wait({trimming}, timeout=_STOP_S)
        trimming.cancel()
        retaining.cancel()
        await self.keeper.close()
        if self._failure:
            raise ActorFault(self._failure)

    async def _observe(self) -> None:
        """Publish the state of the run, and what keeps it from advancing."""
        watch = await follow_run(self.context)
        await asyncio.gather(
            publish_state(self.context, watch, self.keeper.now),
            watch_for_stalls(self.context, self.keeper, watch, lambda: self._state.trained),
            autoscale(self.context, self.keeper, watch),
            Alerts(self.context, self.keeper, self.fold, watch).watch(),
        )

    def _most(self, pool: str) -> int:
        """Return how many processes a pool may have."""
        group = self.context.config.engine.pools.get(pool)
        return MOST_PROCESSES if group is None else group.most

    def _decided(self) -> Decision | None:
        """Return the next decision about the channel `live`."""
        channel, gateway = self._state.channel, self.context.config.gateway
        self.context.vitals.update(channel.canary.figures())
        serves, canaries = bool(gateway.engines), bool(gateway.canary_engines)
        config = self.context.config
        kl_bound = config.live.safety.kl_bound
        return channel.decide(self.fold.stored, config.weights, serves=serves, canaries=canaries, kl_bound=kl_bound)

    async def _move(self, decision: Decision) -> None:
        """Move the channel `live` or its canary, or publish why not."""
        if isinstance(decision, WeightsPromoted | WeightsCanaried):
            decision = await self._if_there(decision)
        await self.keeper.append_until_stored([decision])
        self.context.log.info("channel decided", **msgspec.to_builtins(decision))

    async def _if_there(self, decision: WeightsPromoted | WeightsCanaried) -> Decision:
        """Refuse a version whose files are gone: the logs name those that were removed before this process, too."""
        if decision.by == "start":
            return decision  # the newest one is never pruned
        if await self._is_there(decision):
            return decision
        why = absent(decision.version, [one for one in self.fold.stored if await self._is_there(one)])
        if decision.by == "canary":
            return CanaryEnded(decision.key, "weights", decision.cause, why)
        by: Literal["command", "gate", "newest", "reward"] = "command" if decision.by == "rollback" else decision.by
        return PromotionRefused(by, decision.cause, why)

    async def _is_there(self, version: StoredVersion | WeightsPromoted | WeightsCanaried) -> bool:
        """Return whether the files of a version are in the store, with those that it is a difference to."""
        names = self.fold.names_of(version.lineage, version.version)
        return bool(names) and all(
            [await is_stored(self.context.bus, self.context.files.weights, name) for name in names]
        )

    async def _scale(self, decision: FleetScaled) -> None:
        await self.keeper.append_until_stored([decision])
        crash_point("fleet.scaled")
        self.context.log.info("fleet scaled", by=decision.by, **decision.wanted)

    def _reconcile(self) -> None:
        """Start missing actors, and ask surplus ones to leave."""
        self._reconciled = self._names
        for name in sorted(self._reconciled, key=number_in_pool):  # the first of each pool first
            self._begin(name)
        for child in list(self._children.values()):
            if child.actor_id not in self._reconciled:
                self._dismiss(child)

    @property
    def _names(self) -> list[str]:
        """The actors that are wanted."""
        pools = self._state.wanted.items()
        names = [f"{pool}-{number}" for pool, count in pools for number in range(1, count + 1)]
        return [name for name in (*names, *self._state.announced) if name not in self._state.withdrawn]

    def _begin(self, name: str) -> None:
        child = self._children.get(name)
        if child is None or child.task is None or child.task.done():
            policy = RestartPolicy(self.context.config.supervision)
            child = self._children[name] = _Child(role_of(name), name, policy)
            child.task = self.context.tasks.start(self._keep_alive(child))
        child.leaving = False  # an actor that was asked to leave, and has not left yet, is started again

    def _dismiss(self, child: _Child) -> None:
        child.leaving = True
        for process in (*child.before.values(), child.process):
            if process is not None:
                process.terminate()

    async def _keep_alive(self, child: _Child) -> None:
        """Run one actor, again and again, until it leaves on purpose or cannot be helped."""
        while not child.leaving:
            code, words = await self._live(child)
            if code == _REPLACED:
                continue
            self._liveness.end(child.actor_id)
            self._lingering.discard(child.actor_id)
            if self._frees_card(child, code):
                await publish(self.context.bus, CardLeft(child.actor_id))  # no successor says so
            if child.leaving or (self.fold.finished and (code == 0 or child.actor_id in self._state.left)):
                return
            if code != LOST:  # however many hosts are lost, another start helps
                child.restarts.add(killed=code < 0, worked=self.fold.achieved > child.achieved)
            child.achieved = self.fold.achieved
            reason = self._state.reasons.pop(child.actor_id, words)
            self.context.log.warning(
                "actor died", actor=child.actor_id, code=code, deaths=child.restarts.count, reason=reason
            )
            if code == DENIED:  # the server refuses its login: it cannot publish that itself
                await publish(self.context.bus, ActorStopped(child.role, child.actor_id, reason, denied=True))
            if code in (FATAL, DENIED) or (child.restarts.should_give_up and not self._of_others(child)):
                self._failure = self._failure or f"{child.actor_id}: {reason}"
                self.context.stop.set()
                return
            self.context.count("restarts")
            await child.restarts.pause()

    def _frees_card(self, child: _Child, code: int) -> bool:
        """Return whether it is an engine that failed as it should leave, maybe with a GPU that it shares."""
        shared = child.role == "engine" and self.context.config.placement.colocate == "time_slice"
        return shared and child.leaving and code != 0

    def _of_others(self, child: _Child) -> bool:
        """Return whether it is an engine whose server is of another owner: a fault there does not end the run."""
        return child.role == "engine" and self.context.config.engine.group_of(child.actor_id).can(Capability.ADDRESSES)

    async def _live(self, child: _Child) -> tuple[int, str]:
        """Run one process of an actor; returns its exit code, and the reason to report if it publishes none itself."""
        job = actor_job(self.context.files.credentials, self.context.config.run, child.role, child.actor_id)
        if child.role == "gateway":
            job = follows(with_gateway_socket(job, self._gateway_socket), list(child.before.values()))
        again = child.restarts.count > 0 or bool(child.before)
        turn = self._starts.turn(again=again) if self.context.placement.here(job) else contextlib.nullcontext()
        try:
            async with turn:
                if child.leaving:
                    return 0, ""
                process = await self._placed(child, job)
                self._on_placed(child, process)
                await first_of(process.wait(), child.started.wait())
            await first_of(process.wait(), child.replaced.wait())
        except OSError as error:  # no process, no memory, no file left: it may be another time
            return 1, f"it cannot be started: {error}"
        except AsyncRLError as error:
            return FATAL if error.fatal else 1, f"it cannot be started: {error}"
        if process.returncode is None:
            child.before[self.context.tasks.start(self._outlived(child, process))] = process
            return _REPLACED, ""
        return await process.wait(), process.end_text

    async def _outlived(self, child: _Child, process: Placed) -> None:
        """Wait for the end of a process that the next one replaces."""
        await first_of(process.wait(), timeout_s=self.context.config.gateway.drain_s + _NEXT_S)
        process.kill()
        await process.wait()
        child.before = {task: one for task, one in child.before.items() if one is not process}

    def _on_leaving(self, actor_id: str, pid: int) -> None:
        """Start the next process of an actor that waits for it; one that shall leave is told that none comes."""
        child = self._children.get(actor_id)
        if child is not None and child.process is not None and child.process.pid == pid:
            if child.leaving:
                child.process.terminate()
            else:
                child.replaced.set()

    def _on_placed(self, child: _Child, process: Placed) -> None:
        crash_point("actor.started")
        child.process = process
        child.started.clear()
        child.replaced.clear()
        child.restarts.begin()
        self._liveness.begin(child.actor_id)
        self._on_started(child.actor_id)  # one on another host may have published its start before this
        if child.leaving:
            process.terminate()

    def _on_started(self, actor_id: str) -> None:
        """Note that the newest process of an actor has published its start."""
        child = self._children.get(actor_id)
        if child is not None and child.process is not None and self._state.pids.get(actor_id) == child.process.pid:
            child.started.set()

    async def _placed(self, child: _Child, job: Job) -> Placed:
        """Start a process, as soon as a host has room for it; that it waits is published once, in its name."""
        waits = False
        while True:
            try:
                return await self.context.placement.start(job)
            except NoRoom as error:
                if child.leaving:
                    raise
                if not waits:
                    self.context.log.warning("actor waits for room", actor=child.actor_id, reason=str(error))
                    await publish(self.context.bus, ActorStopped(child.role, child.actor_id, str(error)))
                waits = True

    def _on_silent(self, actor_id: str) -> None:
        """Kill a process that stopped sending heartbeats: a stopped process does not handle SIGTERM."""
        child = self._children.get(actor_id)
        if actor_id in self._state.left and actor_id not in self._lingering:
            self._lingering.add(actor_id)
            self._liveness.begin(actor_id)  # it has published its end, and may take its time to exit
        elif child is not None and child.process is not None and child.process.returncode is None:
            self.context.log.warning("actor is silent; killed", actor=actor_id)
            child.process.kill()

    def _waited_s(self, actor_id: str) -> float:
        """Return for how long a process of this machine has waited for a CPU; 0 for one of another host."""
        process = self._children[actor_id].process if actor_id in self._children else None
        return cpu_wait_s(process.pid) if isinstance(process, ChildProcess) else 0.0

    async def _stop_all(self) -> None:
        """Ask all actors to leave, those first that make work for others; kill those that do not."""
        rows = self.context.bus.tables.roles
        for phase in sorted({role.stops for role in rows}):
            roles = {role.name for role in rows if role.stops == phase}
            leaving = [child for child in self._children.values() if child.role in roles]
            for child in leaving:
                if child.role == "recorder" and child.task is not None:  # the summary is the last thing it writes, and
                    # a signal before its start would end it without any
                    await first_of(child.task, child.started.wait(), timeout_s=_STOP_S)
                self._dismiss(child)
            tasks = {task for child in leaving for task in (child.task, *child.before) if task is not None}
            if not tasks:
                continue
            await asyncio.wait(tasks, timeout=_SUMMARY_S if "recorder" in roles else _STOP_S)
            for child in leaving:
                for process in (*child.before.values(), child.process):
                    if process is not None and process.returncode is None:
                        self.context.log.warning("actor killed", actor=child.actor_id)
                        process.kill()
                        await process.wait()
