"""`asyncrl samples`: prompts, completions, labels and rewards of a batch or an evaluation of any run."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import msgspec
from rich.text import Text

from asyncrl.cli.options import add_option
from asyncrl.cli.output import Terminal, add_json
from asyncrl.cli.target import add_run, any_run
from asyncrl.errors import WrongUsage
from asyncrl.state.records import reward_text
from asyncrl.state.samples import Sample, Turn, WantedSamples, read_samples
from asyncrl.telemetry.printable import printable
from topics.ids import stage_of
from topics.prompts import ONLY_TASK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    which = parser.add_mutually_exclusive_group()
    add_option(which, "--step N", int, "samples of batch N (default: the newest)")
    add_option(which, "--eval VERSION", int, "samples of the evaluation of VERSION", "version")
    add_option(parser, "--set NAME", str, "with --eval: the evaluation on the held-out set NAME", "dataset")
    add_option(parser, "--count N", 8, "print at most N samples (default: 8; 0 for all)")
    add_json(parser, "one JSON object a line")


def run(arguments: argparse.Namespace) -> int:
    """Print them."""
    if arguments.count < 0:
        raise WrongUsage(f"--count {arguments.count}: expected 0 (all) or more")
    wanted = WantedSamples(arguments.step, arguments.version, arguments.dataset, arguments.count)
    title, samples = asyncio.run(read_samples(any_run(arguments), wanted))
    if arguments.json:
        for sample in samples:
            print(msgspec.json.encode(sample).decode())
        return 0
    console = Terminal(highlight=False, soft_wrap=True)
    console.print(title, style="bold")
    for sample in samples:
        console.print(sample_text(sample))
    return 0


def sample_text(sample: Sample) -> Text:
    """Name, task, reward, label and length on one line, then the prompt and what followed it."""
    graded = "" if sample.reward is None else f"  {reward_text(sample.reward, sample.turn_rewards)}"
    task = "" if sample.task == ONLY_TASK else f"  {sample.task}"
    head = Text(printable(f"\n{sample.name}{task}{graded}"), "bold")
    if sample.tokens is not None:
        marks = "".join(f", {mark}" for mark in ("truncated", "hybrid") if getattr(sample, mark))
        head.append(f"  {sample.tokens:,} tokens{marks}", "not bold")
    if sample.label is not None:
        head.append(f"  label {_plain(sample.label)}", "not bold")
    warm = stage_of(sample.name) == "warmup"
    turns = [_turn_text(turn, "label:   " if warm else "sampled: ") for turn in sample.turns] or [
        Text(printable(sample.completion))
    ]
    if sample.metrics:
        head.append(printable("".join(f"  {name} {value:g}" for name, value in sample.metrics.items())), "not bold")
    artefacts = [Text(printable(f"{name}: {text}"), "dim") for name, text in sample.artefacts.items()]
    return Text("\n").join([head, Text(_plain(sample.prompt), "dim"), *turns, *artefacts])


def _turn_text(turn: Turn, trained: str) -> Text:
    text = printable(turn.text)
    return Text(f"{trained} {text}") if turn.sampled else Text(f"observed: {text}", "dim")


def _plain(value: Any) -> str:
    """Return text, chat messages one a line, or other values as JSON, without control characters."""
    if isinstance(value, list) and all(isinstance(message, dict) and "role" in message for message in value):
        return printable("\n".join(f"{message['role']}: {message.get('content', '')}" for message in value))
    return printable(value if isinstance(value, str) else msgspec.json.encode(value).decode())
