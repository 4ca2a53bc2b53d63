"""`asyncrl replay`: train again from a run's batch log, with no engine, and compare the weights or the metrics."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec

from actors.learner.retraining import (
    ReplayedStep,
    ReplayError,
    Retraining,
    TrainingLog,
    columns,
    first_difference,
    medians,
    medians_text,
    read_training,
)
from asyncrl.algorithms.filters import QUALITY
from asyncrl.bus.connection import Bus
from asyncrl.cli.options import add_option
from asyncrl.cli.output import add_json, show
from asyncrl.cli.target import add_run, add_settings, any_run, read_topics
from asyncrl.config.learner_settings import LayoutSettings
from asyncrl.config.load import with_overrides
from asyncrl.config.setting_types import Settings
from asyncrl.config.settings import Config
from asyncrl.config.trainers import trainer_kind
from asyncrl.data.model_dir import check_model_directory
from asyncrl.files import write_json
from asyncrl.state.records import counted
from asyncrl.telemetry.plot import draw_comparison

_LINE_S = 2.0  # between two lines about steps


class Replay(NamedTuple):
    """The result of a replay."""

    run: str
    changed: dict[str, list[Any]]  # settings that differ: [the run's, the replay's]
    began: str  # with what
    origin: int  # step of the weights it began with
    last: int  # step
    steps: list[ReplayedStep]
    files: dict[str, str]  # written files, by kind
    ranks: int = 1  # of the run's learner


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the newest", remote=False)
    add_option(parser, "--from STEP", int, "start from the checkpoint of STEP, or the last one before it", "at")
    add_option(parser, "--to STEP", int, "stop after this step (default: the last trained step)")
    add_settings(parser, "train with another learner.KEY; repeatable")
    add_option(parser, "--output FOLDER", "", "folder for report, plot, model (with --set: RUN/replays/NUMBER)")
    add_option(parser, "--checkpoint FOLDER", "", "also write a checkpoint of the last step to this folder")
    add_json(parser, "print the report as JSON, and progress to stderr")


def run(arguments: argparse.Namespace) -> int:
    """Train again; returns 1 if weights that should be equal differ, or if it is impossible."""
    replay = _replay(arguments)
    show(arguments, report(replay), lambda: replay_text(replay))
    return 1 if not (replay.changed or _purged(replay)) and first_difference(replay.steps) else 0


def replay_text(replay: Replay) -> str:
    """Return the result of a replay as text."""
    steps, different = replay.steps, first_difference(replay.steps)
    if not steps:
        return f"no step to train again: the weights are those of step {replay.origin}"
    versions = sum(bool(step.published) for step in steps)
    text, published = counted(len(steps), "step"), counted(versions, "published version")
    if replay.changed:
        weights = "differ from those published" if different else "have the bits of those published"
        lines = [medians_text(steps), f"{text} with other settings; the weights {weights}"]
    elif different is None:
        lines = [f"{text}, all {published} bit-equal"]
    else:
        lines = [
            f"step {different.step} differs: version {different.step} was published with digest "
            f"{different.published}, the replay has {different.digest}; {text}, {published}"
        ]
        if replay.ranks > 1:
            lines.append(f"the run's learner has {replay.ranks} ranks, a replay one: sums are rounded in another order")
    if gap := _purged(replay):
        lines.append(f"{gap:,} trajectories were purged: from the first of them on, weights differ")
    return "\n".join([*lines, *(f"{name:>12}  {path}" for name, path in replay.files.items())])


def _purged(replay: Replay) -> int:
    return sum(step.purged for step in replay.steps)


def report(replay: Replay) -> dict[str, Any]:
    """Return the result of a replay as JSON values, for `report.json`."""
    different = first_difference(replay.steps)
    return {
        "run": replay.run,
        "settings": replay.changed,
        "began_with": replay.began,
        "began_at_step": replay.origin,
        "last_step": replay.last,
        "published_versions": sum(bool(step.published) for step in replay.steps),
        "purged_trajectories": _purged(replay),
        "first_different_step": None if different is None else different.step,
        "medians": {name: {"recorded": was, "replayed": now} for name, (was, now) in medians(replay.steps).items()},
        "steps": [step._asdict() for step in replay.steps],
        "files": replay.files,
    }


def replay_config(config: Config, overrides: list[str], *, base: Path = Path()) -> tuple[Config, dict[str, list[Any]]]:
    """Settings of a replay, and those of them that are not the run's.

    Raises:
        ConfigError: settings that cannot be.
        ReplayError: settings that are not the learner's.
    """
    for override in overrides:
        if not override.strip().startswith("learner."):
            raise ReplayError(f"--set {override}: a replay has the tokens that were sampled; only learner.* may change")
    wanted = with_overrides(config, overrides, base=base)
    if gone := [name for name in config.learner.filters if name not in wanted.learner.filters]:
        raise ReplayError(
            f"--set learner.filters: no batch has the groups that {', '.join(gone)} dropped; a replay only adds filters"
        )
    if unknown := {*QUALITY} & ({*wanted.learner.filters} - {*config.learner.filters}):
        raise ReplayError(
            f"--set learner.filters: {', '.join(sorted(unknown))} reads a metric that the run did not compute; "
            "a replay only adds filters of rewards and lengths"
        )
    was, now = (dict(_leaves("learner", learner)) for learner in (config.learner, wanted.learner))
    return wanted, {name: [was[name], now[name]] for name in was if was[name] != now[name]}


def _leaves(key: str, table: Settings) -> Iterator[tuple[str, Any]]:
    """Settings of a table and of those in it, by their dotted keys."""
    for name, value in msgspec.structs.asdict(table).items():
        if isinstance(value, Settings):
            yield from _leaves(f"{key}.{name}", value)
        else:
            yield f"{key}.{name}", value


def _replay(arguments: argparse.Namespace) -> Replay:
    found, output = any_run(arguments), sys.stderr if arguments.json else sys.stdout
    files = found.files
    config, changed = replay_config(files.read_config(), arguments.set, base=files.base)
    out = Path(arguments.output).absolute() if arguments.output else _free(files.root / "replays") if changed else None
    if out is not None and out.exists():
        raise ReplayError(f"{out} exists; name another folder for --output")
    for name, (was, now) in changed.items():
        print(f"other setting: {name} = {now}, the run had {was}", file=output)
    check_model_directory(files.model_path(config.model))
    whole = msgspec.structs.replace(config.learner, ranks=1, layout=LayoutSettings())  # in this process alone
    whole_config = msgspec.structs.replace(config, learner=whole)
    trainer = trainer_kind(whole.trainer).open(whole_config, files.model_path(config.model), files.base)

    async def train(bus: Bus) -> tuple[Replay, Retraining]:
        log = await read_training(bus)
        last = _last_step(arguments, log, config.origin)
        retraining = Retraining(bus, log, trainer, config, files)
        began = await retraining.begin(arguments.at, last)
        replay = Replay(bus.run, changed, began, retraining.step, last, [], {}, config.learner.ranks)
        await _train(replay, retraining, output)
        return replay, retraining

    replay, retraining = read_topics(found, "replay", train)
    if arguments.checkpoint:
        replay.files["checkpoint"] = str(retraining.save(Path(arguments.checkpoint).absolute()))
    if out is not None:
        _write(replay, out, retraining)
    return replay


async def _train(replay: Replay, retraining: Retraining, output: TextIO) -> None:
    """All steps, with a line about the newest now and then."""
    again = f", steps {replay.origin + 1} to {replay.last}" if replay.origin < replay.last else ""
    print(f"run {replay.run}: from {replay.began}{again}", file=output, flush=True)
    printed_at = 0.0
    async for step in retraining.steps(replay.last):
        replay.steps.append(step)
        if step.step == replay.last or time.monotonic() - printed_at > _LINE_S:
            printed_at = time.monotonic()
            print(_line(step, replay), file=output, flush=True)


def _line(step: ReplayedStep, replay: Replay) -> str:
    now, was = (metrics.get("loss", 0.0) for metrics in (step.replayed, step.recorded))
    equal = "  weights equal" if step.published == step.digest else "  weights differ"
    text = equal if step.published and not replay.changed else ""
    return f"step {step.step} of {replay.last}  loss {now:.6g}, recorded {was:.6g}{text}"


def _last_step(arguments: argparse.Namespace, log: TrainingLog, origin: int) -> int:
    """The last step of the replay, which was trained and comes after its beginning."""
    newest = max(log.trained, default=origin)
    last = newest if arguments.to is None else arguments.to
    for name, step in (("--to", last), ("--from", arguments.at)):
        if step is not None and not origin <= step <= newest:
            raise ReplayError(f"{name} {step}: the run trained the steps {origin + 1} to {newest}")
    if arguments.at is not None and arguments.at > last:
        raise ReplayError(f"--from {arguments.at} lies behind --to {last}")
    return last


def _write(replay: Replay, out: Path, retraining: Retraining) -> None:
    out.mkdir(parents=True)
    retraining.export(out / "model")
    replay.files["model"] = str(out / "model")
    if replay.steps:
        draw_comparison(out / "comparison.png", f"run {replay.run}: recorded and replayed", columns(replay.steps))
        replay.files["plot"] = str(out / "comparison.png")
    replay.files["report"] = str(out / "report.json")
    write_json(out / "report.json", report(replay))


def _free(folder: Path) -> Path:
    return next(path for number in count(1) if not (path := folder / str(number)).exists())
