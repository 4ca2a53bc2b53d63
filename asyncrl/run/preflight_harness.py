"""Checks of the programs that work on rows, and of the sandboxes in which they work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from asyncrl.child_pool.frames import Setup
from asyncrl.config.finding import Finding
from asyncrl.config.harness_settings import KINDS, harness_name, harness_settings
from asyncrl.config.held_out import graded_tasks
from asyncrl.config.sandbox_settings import SandboxCapability, sandbox_kind, weaker_limits
from asyncrl.config.settings import Config, ModelSettings
from asyncrl.config.tasks import Task
from asyncrl.config.worker_pools import pool_of_task, sandbox_of_pool
from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.environment_names import EnvironmentCapability, environment_can
from asyncrl.harnesses.kinds import harness_kind
from asyncrl.live.turn_boundary import AUTO, open_boundary


def check_harnesses(config: Config, base: Path) -> Iterator[Finding]:
    """Find harnesses that cannot work, and sandboxes that cannot start, of each pool of rollout workers."""
    using = [task for task in graded_tasks(config).values() if harness_name(task.rollout)]
    pools = {task.name: pool_of_task(config, "rollout", task.name) for task in using}
    for pool in dict.fromkeys(pools.values()):
        own = msgspec.structs.replace(config, sandbox=sandbox_of_pool(config, pool))
        yield from _of_pool(own, base, [task for task in using if pools[task.name] == pool])


def _of_pool(config: Config, base: Path, using: list[Task]) -> Iterator[Finding]:
    capabilities = sandbox_kind(config.sandbox.kind).capabilities()
    for task in using:
        name = harness_name(task.rollout)
        settings = harness_settings(name, config.harnesses)
        if settings is None:
            known = ", ".join([*config.harnesses, *KINDS])
            yield Finding(task.keys("rollout"), f"names the harness {name!r}; known are {known}")
        elif problem := settings.problem():
            yield Finding((f"harnesses.{name}", *task.keys("rollout")), problem)
        elif settings.address == "sandbox" and SandboxCapability.REACHES_WORKER not in capabilities:
            message = f"programs of sandbox.kind = {config.sandbox.kind} cannot reach the policy; take mini or python"
            yield Finding((*task.keys("rollout"), "sandbox.kind"), message)
        elif (program := getattr(settings, "program", "")) and not sandbox_kind(config.sandbox.kind).finds(program):
            message = f"this machine has no program {program}; install it, or set the path of the program"
            yield Finding((f"harnesses.{name}.program", *task.keys("rollout")), message)
    kind = sandbox_kind(config.sandbox.kind)
    faults = [*kind.checks(config.sandbox)]
    yield from faults
    if not faults and (problem := kind.problem(config.sandbox)):
        yield Finding(("sandbox.kind",), problem)
    linking = [task for task in using if environment_can(task.source, EnvironmentCapability.TESTS)]
    if linking and SandboxCapability.LINKS not in kind.capabilities():
        message = f"{linking[0].source} has tests at absolute paths, which sandboxes of this kind do not have"
        yield Finding(("sandbox.kind", *linking[0].keys("source")), f"{message}; set another kind")
    imaging = [task for task in linking if task.options.get("images")]
    if imaging and SandboxCapability.IMAGES not in kind.capabilities():
        message = f"{imaging[0].source} has images, which sandboxes of this kind do not take"
        yield Finding(("sandbox.kind", *imaging[0].keys("source")), f"{message}; set podman or docker")
    yield from _template(config.model, base, using[0])


def sandbox_hints(config: Config) -> list[str]:
    """Return the limits of sandboxes that hold only in part for workers on this machine."""
    using = any(harness_name(task.rollout) for task in graded_tasks(config).values())
    return weaker_limits(config.sandbox) if using and config.placement.one_machine else []


def _template(model: ModelSettings, base: Path, task: Task) -> Iterator[Finding]:
    keys, path = ("model.path", "model.create.template", *task.keys("rollout")), base / model.path
    if not model.path:
        if not model.create.template:
            yield Finding(keys, "a harness holds conversations, and the made model has no model.create.template")
    elif (path / "tokenizer.json").is_file():
        try:
            open_boundary(TaskTokenizer.load(path), AUTO)
        except TokenizerError as error:
            yield Finding(keys, str(error))


def harness_setups(config: Config, base: Path, limit_s: float) -> dict[tuple[str, ...], Setup]:
    """Return how child processes load the functions that harnesses name, by the keys of the settings."""
    found: dict[tuple[str, ...], Setup] = {}
    for task in graded_tasks(config).values():
        settings = harness_settings(name := harness_name(task.rollout), config.harnesses)
        if settings is None or settings.problem():
            continue
        if (setup := harness_kind(settings).setup(settings, base, limit_s)) is not None:
            found[f"harnesses.{name}.function",] = setup
    return found
