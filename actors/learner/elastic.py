"""A trainer group that continues with fewer ranks if GPUs are not replaced, and with all ranks once they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from actors.learner.group import GroupLost, RankProcesses, only
from actors.runtime.actor import Context
from asyncrl.background import BackgroundTasks, first_of
from asyncrl.run.placement import Job, NoRoom
from asyncrl.training.megatron.parallel_config import Layout, layout_of

_PAUSE_S = 2.0  # between two attempts to start all ranks, and two looks for a GPU at least


def chosen_gpus(gpus: Sequence[int], layout: Layout) -> Sequence[int]:
    """Return the GPUs that a learner continues with: as many of the first ones as the layout divides, or an empty
    sequence.

    Every replica of the model has its ranks, and every stage whole groups of ranks that share experts.
    """
    for count in range(len(gpus), 0, -1):
        if count % layout.model == 0 and count // layout.pipeline % layout.sharing == 0:
            return gpus[:count]
    return ()


class ElasticGroup:
    """See `TrainerGroup`.

    All ranks are tried whenever the group starts. Those whose GPUs are gone for `learner.elastic_s` are given up, one
    after another, and the others start without them. Whether the GPUs come back is looked at while it trains.
    """

    def __init__(self, context: Context, on_lost: Callable[[], None]) -> None:
        self._context, self._on_lost = context, on_lost
        self._group = RankProcesses(context, on_lost)
        self._closed = asyncio.Event()
        self._looking = BackgroundTasks(self._on_fault)
        self.can_grow = False

    async def open(self) -> None:
        """See `TrainerGroup.open`.

        Raises:
            GroupLost: too few GPUs are left for one model, or a rank did not start for another reason.
        """
        context, learner = self._context, self._context.config.learner
        missing, began, reason = set[int](), time.monotonic(), ""
        while True:
            left = [gpu for gpu in range(learner.ranks) if gpu not in missing]
            if not (gpus := chosen_gpus(left, layout_of(context.config.learner))):
                found = f"GPUs {sorted(missing)} are missing, and the {len(left)} others hold no whole model"
                raise GroupLost(f"{found}; the last reason: {reason}")
            self._group = RankProcesses(context, self._on_lost, gpus)
            try:
                await self._group.open()
                break
            except GroupLost as error:
                await self._group.close()
                if self._is_stopped() or error.rank is None:
                    raise
                gone, reason = gpus[error.rank], str(error)
                waited = time.monotonic() - began
                context.log.warning("GPU missing", gpu=gone, waited_s=round(waited, 1), reason=reason)
                if waited >= learner.elastic_s:
                    missing.add(gone)
                    continue
                await self._pause(min(_PAUSE_S, learner.elastic_s - waited))
                if self._is_stopped():
                    raise
        context.vitals["ranks_missing"] = learner.ranks - len(gpus)
        if missing:
            context.log.warning("learner continues with fewer ranks", gpus=list(gpus), missing=sorted(missing))
            self._looking.start(self._until_back(left, missing, len(gpus)))

    async def _until_back(self, left: Sequence[int], missing: set[int], ranks: int) -> None:
        """Look for the GPUs that are missing until there are enough of them for more ranks."""
        while not self._is_stopped():
            await self._pause(max(_PAUSE_S, self._context.config.learner.elastic_s))
            back = [gpu for gpu in sorted(missing) if await self._works(gpu)]
            if len(chosen_gpus(sorted([*left, *back]), layout_of(self._context.config.learner))) > ranks:
                self._context.log.info("missing GPUs are back", gpus=back)
                self.can_grow = True
                return

    async def _works(self, gpu: int) -> bool:
        """Return whether a new process can use a GPU."""
        learner = self._context.config.learner
        environment = only(self._context, [gpu])
        name = f"{self._context.actor_id}.gpu"
        job = Job(name, "actors.learner.gpu_probe", (learner.device,), environment=environment)
        try:
            process = await self._context.placement.start(job)
        except NoRoom:
            return False
        try:
            async with asyncio.timeout(learner.start_s):
                return await process.wait() == 0
        except TimeoutError:
            return False
        finally:
            process.kill()

    def _on_fault(self, error: BaseException) -> None:
        self._context.log.warning("missing GPUs are not checked", reason=f"{type(error).__name__}: {error}")

    def _is_stopped(self) -> bool:
        return self._closed.is_set() or self._context.stop.is_set()

    async def _pause(self, seconds: float) -> None:
        await first_of(self._closed.wait(), self._context.stop.wait(), timeout_s=seconds)

    async def ask(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return await self._group.ask(method, *arguments)

    async def ask_first(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return await self._group.ask_first(method, *arguments)

    def check(self) -> None:
        self._group.check()

    async def close(self) -> None:
        self._closed.set()
        self._looking.cancel()
        await self._group.close()
