"""`asyncrl samples`: prompts, completions, labels and rewards of a batch or an evaluation, from the logs of any run."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.text import Text

from asyncrl.bus.connection import Bus
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record, read_message
from asyncrl.bus.talk import BlobMissing, read
from asyncrl.cli.options import add_run
from asyncrl.cli.reach import reached
from asyncrl.errors import Fault
from topics.batches import BATCH_PACKED, BatchMember, BatchPacked
from topics.evals import EVAL_SCORED, EvalScored
from topics.prompts import PromptRow
from topics.topic import BATCHES, EVALS, TRAJECTORIES, Topic
from topics.trajectories import TrajectoryGenerated
from topics.wire import WireError


class Sample(NamedTuple):
    """One answer of the policy, as people read it."""

    name: str  # of the trajectory, or number in its evaluation
    reward: float | None  # None where it is not graded, or was not looked for
    prompt: Any
    completion: str
    label: Any
    tokens: int | None  # sampled
    truncated: bool


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
    title, samples = asyncio.run(_read(arguments))
    if arguments.json:
        for sample in samples:
            print(msgspec.json.encode(sample._asdict()).decode())
        return 0
    console = Console(highlight=False)
    console.print(title, style="bold")
    for sample in samples:
        console.print(sample_text(sample))
    return 0


def sample_text(sample: Sample) -> Text:
    """Name, reward, label and length on one line, then prompt and completion."""
    graded = "" if sample.reward is None else f"  reward {sample.reward:g}"
    head = Text(f"\n{sample.name}{graded}", "bold")
    if sample.tokens is not None:
        head.append(f"  {sample.tokens:,} tokens{', truncated' if sample.truncated else ''}", "not bold")
    if sample.label is not None:
        head.append(f"  label {_plain(sample.label)}", "not bold")
    return Text("\n").join([head, Text(_plain(sample.prompt), "dim"), Text(sample.completion)])


def _plain(value: Any) -> str:
    """Text as it is; chat messages one a line; other values as JSON."""
    if isinstance(value, list) and all(isinstance(message, dict) and "role" in message for message in value):
        return "\n".join(f"{message['role']}: {message.get('content', '')}" for message in value)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


async def _read(arguments: argparse.Namespace) -> tuple[str, list[Sample]]:
    async with reached(arguments, "samples") as bus:
        if arguments.version is not None:
            return await _of_evaluation(bus, arguments.version, arguments.count)
        return await _of_batch(bus, arguments.step, arguments.count)


async def _of_batch(bus: Bus, step: int | None, count: int) -> tuple[str, list[Sample]]:
    batches: dict[int, BatchPacked] = {}

    def apply(_topic: Topic[Any], message: BatchPacked, _record: Record) -> None:
        if step in (None, message.step):
            batches.clear()
            batches[message.step] = message

    await _read_all(bus, BATCHES, BATCH_PACKED, apply)
    if not batches:
        raise Fault(f"run {bus.run} has packed no batch{'' if step is None else f' {step}'}")
    (packed,) = batches.values()
    members = [member for group in packed.groups for member in group.members]
    samples = []
    async for sample in _payloads(bus, members):
        samples.append(sample)
        if len(samples) == count:
            break
    if not samples:
        raise Fault(
            f"run {bus.run}: the tokens of batch {packed.step} were trimmed; the newest batches are there, and with "
            "nats.keep = run all of them"
        )
    title = f"run {bus.run}, batch {packed.step} ({packed.stage}): {len(samples)} of {len(members)} trajectories"
    return title, samples


async def _payloads(bus: Bus, members: list[BatchMember]) -> AsyncIterator[Sample]:
    """The members whose tokens are still stored."""
    for member in members:
        sample = await read_sample(bus, member.trajectory_id, member.payload.sequence)
        if sample is not None:
            yield sample._replace(reward=member.reward)


async def read_sample(bus: Bus, trajectory_id: str, sequence: int) -> Sample | None:
    """What a result says; None where it was trimmed or cannot be read.

    Args:
        sequence: of the result in TRAJECTORIES.
    """
    record = await read_message(bus, TRAJECTORIES, sequence)
    if record is None:
        return None
    try:
        generated = await read(bus, TrajectoryGenerated, record)
    except (WireError, BlobMissing):
        return None
    row = generated.rows[0] if generated.rows else PromptRow("")
    tokens = sum(count.tokens for count in generated.versions)
    return Sample(trajectory_id, None, row.prompt, generated.completion, row.label, tokens, generated.truncated)


async def _of_evaluation(bus: Bus, version: int, count: int) -> tuple[str, list[Sample]]:
    found: list[EvalScored] = []

    def apply(_topic: Topic[Any], message: EvalScored, _record: Record) -> None:
        found.append(message)

    await _read_all(bus, EVALS, EVAL_SCORED, apply)
    scored = next((scored for scored in reversed(found) if scored.version == version), None)
    if scored is None:
        known = ", ".join(str(scored.version) for scored in found) or "none"
        raise Fault(f"run {bus.run} has no evaluation of version {version}; there are: {known}")
    samples = [
        Sample(
            str(number),
            sample.get("reward", 0.0),
            sample.get("prompt"),
            sample.get("completion", ""),
            sample.get("label"),
            None,
            False,
        )
        for number, sample in enumerate(scored.samples[: count or None])
    ]
    return f"run {bus.run}, evaluation of version {version}: {scored.accuracy:.3f} on {scored.prompts} prompts", samples


async def _read_all(bus: Bus, stream: Any, topic: Topic[Any], apply: Any) -> None:
    listener = Listener(bus, stream, apply, lambda _record, _error: None, subjects=[topic.pattern(bus.run)])
    await listener.read()
