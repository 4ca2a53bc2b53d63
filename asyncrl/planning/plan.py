"""The plan of a config: rates of its engine and trainer, and the settings that fit them."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from asyncrl.config.devices import gpus_of_learner
from asyncrl.config.pools import purpose_of
from asyncrl.config.settings import Config
from asyncrl.config.tasks import largest_group
from asyncrl.planning.proposal import Devices, Measured, Proposal, Rows, devices_of, proposal
from asyncrl.planning.rates import engine_rate, prompts_of, trainer_rate
from asyncrl.run.directory import RunFiles
from asyncrl.training.init_model import create_configured
from asyncrl.training.megatron.parallel_config import layout_of

_WORTH = 1.05  # gain of larger batches that is told


class Plan(msgspec.Struct, frozen=True):
    """Measured rates and proposed settings."""

    measured: Measured
    proposal: Proposal
    step_s: float  # expected
    settings: dict[str, object]  # proposed, by dotted key

    def text(self) -> str:
        """The plan for people: figures, then settings as TOML."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        measured, proposed = self.measured, self.proposal
        yield "engine alone, tokens/s by concurrent requests: " + ", ".join(
            f"{count}: {rate:,.0f}" for count, rate in measured.engine.items()
        )
        mean = statistics.fmean(measured.lengths)
        yield f"trainer alone: {measured.trainer:,.0f} tokens/s of answers"
        yield f"answers: {mean:,.0f} tokens on average, sigma of their logarithm {measured.sigma:.2f}"
        yield (
            f"expected: at most {proposed.tokens_per_s:,.0f} trained tokens/s, {self.step_s:.2g} s a step; "
            f"engines {proposed.engine_busy_share:.0%} busy, learner {proposed.learner_busy_share:.0%}"
        )
        if proposed.best_tokens_per_s > _WORTH * proposed.tokens_per_s:
            yield (
                f"buffer.batch_groups = {proposed.best_batch_groups} would allow the slots of the engine's best rate: "
                f"{proposed.best_tokens_per_s:,.0f} tokens/s"
            )
        if "placement.colocate" in self.settings:
            yield 'an engine on each GPU, and the learner shares one of them: placement.colocate = "memory"'
        yield "proposed settings:"
        for key, value in self.settings.items():
            yield f"{key} = {msgspec.json.encode(value).decode()}"


async def plan(config: Config, base: Path, seconds: float) -> Plan:
    """Measure one server and one rank, one after the other, and propose devices, slots and batch.

    Args:
        config: of the run.
        base: folder that its relative paths start from.
        seconds: of all measurements, without the start of the server and the load of the model.

    Raises:
        AsyncRLError: the server does not start, or a rate cannot be measured.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-plan-") as scratch:
        files = RunFiles(Path(scratch), base)
        files.logs.mkdir()
        if not config.model.path:
            await asyncio.to_thread(create_configured, files.model, config)
        engine = await engine_rate(config, files, await prompts_of(config, files), seconds / 2)
        trainer = await asyncio.to_thread(trainer_rate, config, files, engine.sampled, seconds / 2)
    measured = Measured(engine.tokens_per_s, trainer, [answer for _, answer in engine.sampled])
    rows = Rows(config.buffer.batch_groups, largest_group(config), config.buffer.max_lag)
    found = proposal(measured, rows, devices_for(config, measured))
    step_s = statistics.fmean(measured.lengths) * rows.batch_groups * rows.group_size / found.tokens_per_s
    return Plan(measured, found, step_s, settings_for(config, found))


def _gpus_of(config: Config) -> set[int]:
    """Return the numbers of the GPUs that the config names."""
    found = set(gpus_of_learner(config.learner))
    for group in config.engine.pools.values():
        if group.on_gpus:
            found.update(group.gpus or range(group.servers * group.gpus_needed))
    return found


def devices_for(config: Config, measured: Measured) -> Devices:
    """Divide the GPUs; on a CPU engine and learner have one process each, and servers of several GPUs stay as are."""
    groups = [group for pool, group in config.engine.pools.items() if purpose_of(config, pool) == "training"]
    learner, gpus = config.learner, len(_gpus_of(config))
    divided = all(group.on_gpus and group.gpus_needed == 1 for group in groups) and learner.device.startswith("cuda")
    if divided and layout_of(learner).model == 1:
        return devices_of(measured.best, measured.trainer, gpus)
    engines, ranks = (sum(group.servers for group in groups), learner.ranks) if gpus else (1, 1)
    if gpus or (os.cpu_count() or 1) > 1:
        return Devices(engines, ranks, shared=False)
    return Devices(1, 1, shared=True)


def settings_for(config: Config, found: Proposal) -> dict[str, object]:
    """Return the settings of a proposal, by dotted key."""
    devices, settings = found.devices, dict[str, object]()
    if _gpus_of(config) and not config.engine.groups:
        learner = range(devices.ranks)
        engines = range(devices.engines) if devices.shared else range(devices.ranks, devices.ranks + devices.engines)
        settings["learner.device"] = "cuda:0" if len(learner) == 1 else "cuda"
        settings["learner.ranks"] = devices.ranks
        settings["engine.count"], settings["engine.gpus"] = devices.engines, list(engines)
        if devices.shared:
            settings |= {"placement.colocate": "memory", "placement.engine_fraction": 0.4}
            settings["weights.transport"] = "never"  # a direct way reaches servers on the learner's GPU, or the others
    settings["rollout.slots"] = -(-found.slots // config.rollout.workers)
    settings["buffer.batch_groups"] = config.buffer.batch_groups
    return settings
