"""`asyncrl fork`: start a new run from any step of another."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from actors.learner.retraining import TrainingLog, read_training
from asyncrl.bus.connection import Bus
from asyncrl.bus.merged_reader import read_each
from asyncrl.cli.target import add_directory, add_settings, any_run, read_topics
from asyncrl.cli.up import bring_up
from asyncrl.config.check_learner import has_critic
from asyncrl.config.learner_settings import LoraSettings
from asyncrl.config.load import LoadedConfig, with_overrides
from asyncrl.config.settings import Config, StartSettings
from asyncrl.config.tasks import Begun, first_stages
from asyncrl.errors import LaunchError
from asyncrl.process import python, with_parent
from asyncrl.run.launch import Launch
from asyncrl.run.preflight import check_surroundings
from asyncrl.weights.adapters import AdapterShape
from topics.ids import TASK, letter_of, number_of
from topics.stages import STAGE_BEGAN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_id", metavar="RUN", help="id or directory of the run to start from, live or over")
    parser.add_argument("new", metavar="NEW", help="id of the new run")
    parser.add_argument("--at", type=int, required=True, metavar="STEP", help="the new run continues after this step")
    add_settings(parser, "override a setting of RUN; repeatable")
    add_directory(parser)


def run(arguments: argparse.Namespace) -> int:
    """Make the weights of that step, then start, watch and end the new run as `asyncrl up` does."""
    import uvloop

    found = any_run(arguments)
    files, root = found.files, found.files.root
    log, stages = read_topics(found, "fork", _read)
    start = begins_after(log, files.read_config(), arguments.at, stages)
    overrides = [*arguments.set, f"run={arguments.new}"]
    config = forked_config(files.read_config(), start, overrides, root.parent, files.base)
    launch = Launch(LoadedConfig(config, files.base, files.config))
    launch.prepare()
    try:
        checkpoint = _retrained(root, arguments.at, launch.files.root / "start")
    except BaseException:
        shutil.rmtree(launch.files.root)  # of a run that never was
        raise
    launch.begin_with(checkpoint)
    print(f"run {launch.config.run} in {launch.files.root}, from step {arguments.at} of run {root.name}", flush=True)
    return int(uvloop.run(bring_up(launch)))


async def _read(bus: Bus) -> tuple[TrainingLog, list[Begun]]:
    begun: list[Begun] = []  # what cannot be read is none: the prompter left it out, too
    await read_each(bus, STAGE_BEGAN, lambda message, _record: begun.append((message.prompt, message.name)))
    return await read_training(bus), begun


def begins_after(log: TrainingLog, config: Config, step: int, stages: Sequence[Begun] = ()) -> StartSettings:
    """Return where a run continues after a step of another: with the prompt after all that were packed up to that step.

    Args:
        stages: that the other run has begun. Those up to that prompt hold in the new one, too.

    Raises:
        LaunchError: the run has not trained that step.
    """
    newest = max(log.trained, default=config.origin)
    if not config.start.step <= step <= newest:
        if newest < config.start.step:
            raise LaunchError(f"--at {step}: run {config.run} has trained no step of RL yet that it could be forked at")
        kept = [str(saved.step) for saved in log.checkpoints if Path(saved.path).exists()]
        raise LaunchError(
            f"--at {step}: run {config.run} can be forked at its steps {config.start.step} to {newest}; its "
            f"checkpoints are at {', '.join(kept) or 'none'}"
        )
    packed = [groups for number, (groups, _) in log.batches.items() if number <= step]
    numbers = [
        number_of(group.prompt_id) for batch in packed for group in batch.groups if letter_of(group.prompt_id) == TASK
    ]
    prompt = max(numbers, default=config.start.prompt - 1) + 1
    begun = {str(first): name for first, name in [*first_stages(config.start), *stages] if first <= prompt}
    critic = config.critic_origin if has_critic(config) else -1
    return StartSettings(checkpoint="start", step=step, prompt=prompt, stages=begun, critic=critic)


def forked_config(config: Config, start: StartSettings, overrides: list[str], directory: Path, base: Path) -> Config:
    """The settings of a run, with others in their place, and with what the new one starts with.

    Raises:
        ConfigError: with all that is wrong with them.
        LaunchError: they name another start, a run that exists, or adapters that those of the run do not fit.
    """
    if any(override.strip().startswith("start.") for override in overrides):
        raise LaunchError("--at gives what the new run starts with; the settings of start cannot be given")
    warmup = msgspec.structs.replace(config.warmup, steps=0)
    plain = msgspec.structs.replace(config, start=StartSettings(), warmup=warmup, directory=str(directory))
    chosen = with_overrides(plain, overrides, base=base, further=check_surroundings)
    if (taken := Path(chosen.directory).absolute() / chosen.run).exists():
        raise LaunchError(f"{taken} is a run; give the new run another id, or remove that one: asyncrl rm {chosen.run}")
    _check_adapters(config, chosen.learner.lora)
    if chosen.learner.lora.rank:
        moved = start.step > 0 or config.warmup.steps > 0 or bool(config.start.checkpoint)
        trained = config.start.trained or (moved and not config.learner.lora.rank)
        start = msgspec.structs.replace(start, trained=trained)
    return with_overrides(msgspec.structs.replace(chosen, start=start), [])


def _check_adapters(config: Config, now: LoraSettings) -> None:
    """Refuse adapters of a fork that are not those that the run trained."""
    was = config.learner.lora
    trained_there, wanted = [AdapterShape(lora.rank, lora.alpha, [*lora.targets]) for lora in (was, now)]
    if was.rank and trained_there != wanted:
        raise LaunchError(
            f"--set learner.lora: run {config.run} trained adapters of {trained_there}, which would be lost or count "
            "otherwise; keep them, or begin a run with the model that it exported (model.path)"
        )


def _retrained(root: Path, step: int, folder: Path) -> Path:
    """The checkpoint of a step, trained again from the nearest earlier one in a separate process, so that this one
    stays small.

    Raises:
        LaunchError: it could not be made; the reason is printed.
    """
    words = ["replay", str(root), "--from", str(step), "--to", str(step), "--checkpoint", str(folder)]
    subprocess.run(python("-m", "asyncrl.cli.main", *words), preexec_fn=with_parent(), check=False)
    made = list(folder.glob(f"step{step:06d}-*"))
    if not made:
        raise LaunchError(f"run {root.name} cannot be forked at step {step}: its weights there cannot be made")
    return made[0]
