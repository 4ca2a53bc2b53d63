"""The rollout function of a harness: prepare a sandbox, let the program work, run the tests."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from asyncrl.config.harness_settings import HarnessSettings, harness_name, harness_settings
from asyncrl.environment_names import ROLLOUT
from asyncrl.errors import FunctionError
from asyncrl.functions import load_rollout
from asyncrl.harnesses.episode import episode_rollout
from asyncrl.harnesses.harness import Attempt, Harness, HarnessFailed
from asyncrl.harnesses.kinds import harness_kind
from asyncrl.harnesses.limits import within
from asyncrl.harnesses.snapshots import Snapshots
from asyncrl.harnesses.task_files import Graded, OpenSandbox, TaskFiles, collect, difference, grade, prepare
from asyncrl.rollout.context import RolloutContext, RolloutFunction, single_turn
from asyncrl.sandboxes.sandbox import Sandbox
from topics.prompts import PromptRow


def rollout_function(
    rollout: str, base: Path, harnesses: Mapping[str, HarnessSettings], opened: OpenSandbox
) -> RolloutFunction:
    """Return the rollout function that `task.rollout` names.

    Args:
        base: folder that relative paths start from.
        opened: gives the sandboxes of a harness.

    Raises:
        FunctionError: it cannot be loaded.
    """
    if rollout == "single_turn":
        return single_turn
    if rollout == ROLLOUT:
        return episode_rollout(base)
    if not (name := harness_name(rollout)):
        return load_rollout(rollout, base=base)
    settings = harness_settings(name, harnesses)
    if settings is None:
        raise FunctionError(f"{rollout}: the config has no [harnesses.{name}]")
    return harness_rollout(harness_kind(settings).make(settings, base), settings, opened)


def harness_rollout(harness: Harness, settings: HarnessSettings, opened: OpenSandbox) -> RolloutFunction:
    """Return the rollout function of a harness."""

    async def rollout(row: PromptRow, context: RolloutContext) -> None:
        task, name = TaskFiles.of(row), type(harness).__name__.lower()
        named = {key: value for key, value in (("links", task.links), ("image", task.image)) if value}
        open_named = partial(opened, **named) if named else opened
        limit_s = min(settings.time_limit_s, task.limit_s or settings.time_limit_s)
        async with AsyncExitStack() as stack:
            with context.working("sandbox"):
                sandbox = await stack.enter_async_context(open_named())
                since = await prepare(sandbox, task)
            async with context.slot():
                fault = await _run(harness, settings, (row, context, sandbox), limit_s)
            if fault and settings.at_failure == "drop":
                raise HarnessFailed(fault)
            graded = Graded(settings.failure_reward, {}, "") if fault and settings.at_failure == "reward" else None
            if graded is None and not task.tests:
                _tell(context, fault, None)
                return
            with context.working(name):
                collected = await collect(sandbox, since)
        with context.working("tests"):
            graded = graded or await grade(open_named, task, collected)
        turns = context.turns if settings.address == "none" else 0  # a program may repeat calls, and make some at once
        _tell(context, fault, graded, diff=difference(task.files, collected.files), turns=turns)

    return rollout


async def _run(
    harness: Harness, settings: HarnessSettings, given: tuple[PromptRow, RolloutContext, Sandbox], limit_s: float
) -> str:
    """Let the program of a harness work on a row in a sandbox; returns why it failed, or ""."""
    row, context, sandbox = given
    again = settings.resume == "abandon"
    async with AsyncExitStack() as stack:
        endpoint, tools = context.endpoint(again=again), await context.tools(*settings.tools, again=again)
        if settings.address != "none":
            listening = await sandbox.listen() if settings.address == "sandbox" else None
            await stack.enter_async_context(endpoint.listen(listening, tools if settings.tools else None))
        stack.enter_context(context.working(type(harness).__name__.lower()))
        resumed = False
        if settings.resume == "snapshot":
            snapshots = Snapshots(context.snapshots(), sandbox, endpoint)
            resumed, endpoint.snapshot = await snapshots.resume(), snapshots.take
        attempt = Attempt(row, context, endpoint, sandbox, tools, resumed)
        fault = await within(harness.run(attempt), endpoint, limit_s)
    if settings.tools:
        context.outcome(metrics={"tool_calls": tools.calls, "tool_failures": tools.failures})
    return fault


def _tell(context: RolloutContext, fault: str, graded: Graded | None, *, diff: str = "", turns: int = 0) -> None:
    """Set the outcome of an attempt; without tests, the reward of the run gives the reward.

    Args:
        turns: replies, of which the last one earns the reward; 0: replies have no rewards.
    """
    artefacts = {"diff": diff, "failure": fault, "tests": graded.report if graded else ""}
    context.outcome(
        None if graded is None else graded.reward,
        metrics={**(graded.metrics if graded else {}), "failed": float(bool(fault))},
        artefacts={name: text for name, text in artefacts.items() if text},
        turn_rewards=[*[0.0] * (turns - 1), graded.reward] if graded and turns else (),
    )
