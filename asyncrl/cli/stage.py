"""`asyncrl stage`: other data, or another objective, during the run."""

from __future__ import annotations

import argparse
import asyncio

from asyncrl.api.requests import watched
from asyncrl.bus.publish import publish
from asyncrl.cli.target import add_run, add_wait, any_run, live_run, read_topics, tell_apart
from asyncrl.config.reference import toml_text
from asyncrl.config.staged import of_learner
from asyncrl.config.task_settings import StageSettings
from asyncrl.config.tasks import Task, stage_tasks, tasks_of
from asyncrl.errors import AsyncRLError, WrongUsage
from asyncrl.run.connect import FoundRun
from asyncrl.state.run_state import RunState
from asyncrl.state.watch import read_state
from topics.ids import TASK, prompt_name
from topics.stages import StageBegan, StageRequested

NO_STAGE = "(none)"  # before the first one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the live one; to list, else the newest")
    parser.add_argument("stage", nargs="?", default="", metavar="NAME", help="stage to switch to (default: list them)")
    add_wait(parser)


def run(arguments: argparse.Namespace) -> int:
    """List the stages, also of a run that is over, or request one and wait until the prompter has recorded it."""
    tell_apart(arguments, "stage", lambda found: found.files.read_config().stages, live=True)
    if not arguments.stage:
        print(stages_text(read_topics(any_run(arguments), "stage", read_state)))
        return 0
    print(asyncio.run(_switch(live_run(arguments), arguments.stage, arguments.wait)))
    return 0


async def _switch(found: FoundRun, name: str, wait_s: float) -> str:
    async with watched(found, "stage") as (bus, state, until):
        if name not in state.config.stages:
            known = ", ".join(state.config.stages) or "none, its config has no [stages.NAME]"
            raise WrongUsage(f"run {state.run} has no stage {name!r}; its stages: {known}")
        sequence = await publish(bus, StageRequested(name=name))

        def began() -> StageBegan | None:
            return next((one for one in state.stages if one.request >= sequence), None)

        if not await until(lambda: began() is not None, wait_s):
            raise AsyncRLError(
                f"after {wait_s:.0f} s stage {name} has not begun: the prompter has not answered. The request stays, "
                f"and holds once it does; `asyncrl doctor {state.run}` names what keeps it"
            )
        found_one = began()
        assert found_one is not None
        return f"stage {found_one.name} from prompt {prompt_name(TASK, found_one.prompt)} on"


def stages_text(state: RunState) -> str:
    """The stages of a run with their shares; the present one is marked."""
    config, begun = state.config, state.stages_begun
    if not config.stages:
        return f"run {state.run} has no stages: its config has no [stages.NAME]"
    first, current = begun[-1] if begun else (0, "")
    since = f"  since {prompt_name(TASK, first)}" if begun else "  since its beginning"
    width = max(len(NO_STAGE), *map(len, config.stages))
    marks = {current: ("*", since)}
    rows = {"": tasks_of(config)} | {name: stage_tasks(config, name) for name in config.stages}
    return "\n".join(
        f"{mark} {name or NO_STAGE:{width}}  {_tasks_text(tasks)}{_objective_text(config.stages.get(name))}{held}"
        for name, tasks in rows.items()
        for mark, held in [marks.get(name, (" ", ""))]
    )


def _objective_text(stage: StageSettings | None) -> str:
    """Return what a stage gives of the objective, and the condition under which it begins by itself."""
    if stage is None:
        return ""
    given = {key: value for key, value in of_learner(stage).items() if key != "advantage" and value != {}}
    given |= {key: value for key in ("at_step", "at_accuracy") if (value := getattr(stage, key))}
    return "".join(f"; {key} {toml_text(value)}" for key, value in given.items())


def _tasks_text(tasks: dict[str, Task]) -> str:
    return ", ".join(
        f"{task.name} {task.share} (groups of {task.group_size}, temperature {task.temperature:g}, {task.advantage})"
        for task in tasks.values()
    )
