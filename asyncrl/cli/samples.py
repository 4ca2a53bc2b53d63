"""`asyncrl samples`: prompts, completions, labels and rewards of a batch or an evaluation of any run."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.text import Text

from asyncrl.bus.connection import Bus
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record
from asyncrl.cli.find import find_directory, is_remote
from asyncrl.cli.options import add_run
from asyncrl.cli.reach import reached
from asyncrl.errors import AsyncRLError, WrongUsage
from asyncrl.run.directory import RunFiles
from asyncrl.telemetry.samples import Event, Sample, SampleReader, SamplesFile, Turn
from topics.batches import BATCH_PACKED, BatchMember, BatchPacked
from topics.evals import EVAL_SCORED, EvalScored
from topics.topic import BATCHES, Topic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_run(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="of batch N (default: the newest)")
    which.add_argument("--eval", dest="version", type=int, metavar="VERSION", help="of the evaluation of VERSION")
    parser.add_argument("--count", type=int, default=8, metavar="N", help="at most N (default: 8; 0 for all)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def run(arguments: argparse.Namespace) -> int:
    """Print them."""
    if arguments.count < 0:
        raise WrongUsage(f"--count {arguments.count}: expected 0 (all) or more")
    title, samples = asyncio.run(_read(arguments))
    if arguments.json:
        for sample in samples:
            print(msgspec.json.encode(sample).decode())
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.print(title, style="bold")
    for sample in samples:
        console.print(sample_text(sample))
    return 0


def sample_text(sample: Sample) -> Text:
    """Name, reward, label and length on one line, then the prompt and what followed it."""
    graded = "" if sample.reward is None else f"  reward {sample.reward:g}"
    head = Text(f"\n{sample.name}{graded}", "bold")
    if sample.tokens is not None:
        head.append(f"  {sample.tokens:,} tokens{', truncated' if sample.truncated else ''}", "not bold")
    if sample.label is not None:
        head.append(f"  label {_plain(sample.label)}", "not bold")
    turns = [_turn_text(turn) for turn in sample.turns] or [Text(sample.completion)]
    if sample.metrics:
        head.append("".join(f"  {name} {value:g}" for name, value in sample.metrics.items()), "not bold")
    artefacts = [Text(f"{name}: {text}", "dim") for name, text in sample.artefacts.items()]
    return Text("\n").join([head, Text(_plain(sample.prompt), "dim"), *turns, *artefacts])


def _turn_text(turn: Turn) -> Text:
    return Text(f"sampled:  {turn.text}") if turn.sampled else Text(f"observed: {turn.text}", "dim")


def _plain(value: Any) -> str:
    """Text as it is; chat messages one a line; other values as JSON."""
    if isinstance(value, list) and all(isinstance(message, dict) and "role" in message for message in value):
        return "\n".join(f"{message['role']}: {message.get('content', '')}" for message in value)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def local_directory(arguments: argparse.Namespace) -> Path | None:
    """Directory of the run that is meant; None where it is on another machine."""
    return None if is_remote(arguments) else find_directory(arguments, live=False)


def sample_reader(bus: Bus, root: Path | None) -> SampleReader:
    """A reader of the run's results, with its tokenizer where the run's directory is on this machine."""
    files = RunFiles(root) if root is not None else None
    return SampleReader(bus, files.model_path(files.read_config()) if files is not None else None)


class _Chosen(NamedTuple):
    """A batch or an evaluation whose samples are wanted."""

    event: Event
    step: int
    members: list[BatchMember]
    title: str


async def _read(arguments: argparse.Namespace) -> tuple[str, list[Sample]]:
    root = local_directory(arguments)
    async with reached(arguments, "samples") as bus:
        if arguments.version is not None:
            chosen = await _evaluation(bus, arguments.version)
        else:
            chosen = await _batch(bus, arguments.step)
        return await _samples(bus, chosen, root, arguments.count)


async def _batch(bus: Bus, step: int | None) -> _Chosen:
    """The batch of a step, or the newest one.

    Raises:
        AsyncRLError: there is none.
    """
    found: list[BatchPacked] = []

    def apply(_topic: Topic[Any], message: BatchPacked, _record: Record) -> None:
        if step in (None, message.step):
            found[:] = [message]

    await _read_all(bus, BATCH_PACKED, apply)
    if not found:
        raise AsyncRLError(f"run {bus.run} has packed no batch{'' if step is None else f' {step}'}")
    packed = found[0]
    members = [member for group in packed.groups for member in group.members]
    return _Chosen("step", packed.step, members, f"batch {packed.step} ({packed.stage})")


async def _evaluation(bus: Bus, version: int) -> _Chosen:
    """The evaluation of a version.

    Raises:
        AsyncRLError: there is none.
    """
    found: dict[int, EvalScored] = {}

    def apply(_topic: Topic[Any], message: EvalScored, _record: Record) -> None:
        found[message.version] = message

    await _read_all(bus, EVAL_SCORED, apply)
    if version not in found:
        known = ", ".join(map(str, found)) or "none"
        raise AsyncRLError(f"run {bus.run} has no evaluation of version {version}; there are: {known}")
    scored = found[version]
    title = f"evaluation of version {version}: {scored.accuracy:.3f} on {scored.prompts} prompts"
    return _Chosen("eval", version, scored.members, title)


async def _samples(bus: Bus, chosen: _Chosen, root: Path | None, count: int) -> tuple[str, list[Sample]]:
    """Samples from the logs if they hold as many as are wanted, else from there or the file, whichever has more.

    Raises:
        AsyncRLError: neither has any.
    """
    members = chosen.members
    wanted = min(count or len(members), len(members))
    reader, samples, source = sample_reader(bus, root), [], "from the logs"
    for member in members:
        sample = await reader.read(member.trajectory_id, member.payload.sequence)
        if sample is not None:
            sample.reward = member.reward
            samples.append(sample)
        if len(samples) == wanted:
            break
    kept: dict[int, list[Sample]] = {}  # by step
    if len(samples) < wanted and root is not None:
        kept = {row.step: row.samples for row in SamplesFile(root).rows() if row.event == chosen.event}
        if len(kept.get(chosen.step, [])) > len(samples):
            samples, source = kept[chosen.step][:wanted], "from samples.jsonl, since tokens were trimmed"
    if members and not samples:
        nearest = sorted(sorted(kept, key=lambda step: abs(step - chosen.step))[:2])
        has = f"does not have it; the nearest there: {', '.join(map(str, nearest))}" if nearest else "does not have it"
        raise AsyncRLError(
            f"run {bus.run}: the tokens of {chosen.title} were trimmed, and samples.jsonl {has} "
            "(nats.keep = run keeps all tokens)"
        )
    return f"run {bus.run}, {chosen.title}: {len(samples)} of {len(members)} trajectories, {source}", samples


async def _read_all(bus: Bus, topic: Topic[Any], apply: Any) -> None:
    listener = Listener(bus, BATCHES, apply, lambda _record, _error: None, subjects=[topic.pattern(bus.run)])
    await listener.read()
