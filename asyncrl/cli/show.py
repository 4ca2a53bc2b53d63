"""`asyncrl show`: one trajectory as a conversation, with its tokens in colours."""

from __future__ import annotations

import argparse
import asyncio

import numpy as np

from asyncrl.bus.connection import Bus
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record, read_last
from asyncrl.cli.explain import trajectory_id
from asyncrl.cli.options import add_flag
from asyncrl.cli.output import Terminal
from asyncrl.cli.samples import sample_text
from asyncrl.cli.target import add_run, any_run, read_topics
from asyncrl.errors import AsyncRLError
from asyncrl.run.connect import FoundRun, run_ended
from asyncrl.state.samples import SampleReader, sample_reader
from asyncrl.state.token_text import COLOURS, ColourBy, coloured, legend
from topics.topic import GRADES, TRAJECTORIES, Topic
from topics.trajectories import (
    PROGRESS_STORED,
    TRAJECTORY_FAILED,
    TRAJECTORY_GENERATED,
    TRAJECTORY_PROGRESSED,
    Answer,
    ProgressStored,
    Segment,
    TrajectoryGenerated,
)
from topics.wire import Message


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("trajectory", metavar="TRAJECTORY", help="such as p000042-3: member 3 of the group of a prompt")
    parser.add_argument("--by", choices=COLOURS, default="version", help="what colours tokens (default: version)")
    add_flag(parser, "--follow", "print tokens as their worker stores them, until the trajectory has a result")


def run(arguments: argparse.Namespace) -> int:
    """Print the trajectory."""
    name, found = trajectory_id(arguments), any_run(arguments)
    read_topics(found, "show", lambda bus: _show(bus, found, name, arguments))
    return 0


async def _show(bus: Bus, found: FoundRun, name: str, arguments: argparse.Namespace) -> None:
    reader, console = sample_reader(bus, found), Terminal(highlight=False, soft_wrap=True)
    record = await read_last(bus, TRAJECTORY_GENERATED, name)
    if record is None and arguments.follow:
        await _follow(bus, _Growing(name, console, reader, arguments.by), name)
        record = await read_last(bus, TRAJECTORY_GENERATED, name)
    if record is None:
        why = "it has no result yet (--follow prints its tokens as they are stored), or its tokens were trimmed"
        raise AsyncRLError(f"trajectory {name} of run {found.run}: {why}; `asyncrl explain` shows its history")
    try:
        generated = await reader.result(record.sequence)
    except SecretGone as error:
        raise AsyncRLError(f"trajectory {name}: {error}") from error
    if generated is None:
        raise AsyncRLError(f"trajectory {name}: its result cannot be read; `asyncrl dead` may have it")
    _print_result(console, reader, generated, arguments.by)


def _print_result(console: Terminal, reader: SampleReader, generated: TrajectoryGenerated, by: ColourBy) -> None:
    console.print(sample_text(reader.sample_of(generated)))
    console.print()
    console.print(legend(generated.segments, by))
    for segment in generated.segments:
        console.print(coloured(segment, _texts(reader, segment), by))


def _texts(reader: SampleReader, segment: Segment) -> list[str]:
    """Return the text of each token; their numbers where the tokenizer of the run is on another machine."""
    if reader.tokenizer is None:
        return [f"{token} " for token in segment.tokens.tolist()]
    return list(map(reader.tokenizer.decoder(special=True), segment.tokens.tolist()))


class _Growing:
    """Prints the tokens of a trajectory that its worker stores, each once."""

    def __init__(self, name: str, console: Terminal, reader: SampleReader, by: ColourBy) -> None:
        self.ended = asyncio.Event()
        self._name, self._console, self._reader, self._by = name, console, reader, by
        self._printed: dict[str, int] = {}  # tokens of each call
        self._newest = ""  # call

    def take(self, _topic: Topic[Message], message: Message, _record: Record) -> None:
        """Take in a message about the trajectory."""
        if not isinstance(message, ProgressStored):
            self.ended.set()
            return
        for entry in message.entries:
            if entry.trajectory_id == self._name:
                for path, answer in entry.journal.items():
                    self._print(path, answer)

    def _print(self, path: str, answer: Answer) -> None:
        if path != self._newest:
            self._newest = path
            self._console.print(f"\n{answer.call}: ", style="bold", end="")
        printed = self._printed.get(path, 0)
        first = max(0, printed - answer.start)  # a worker that took the trajectory over may store some tokens again
        count = len(answer.tokens)
        if first >= count:
            return
        versions = np.broadcast_to(answer.versions, (count,)).astype(np.int32)
        segment = Segment(answer.tokens, np.ones(count, np.uint8), answer.logprobs, versions)
        self._printed[path] = answer.start + count
        self._console.print(coloured(segment, _texts(self._reader, segment), self._by, first), end="")


async def _follow(bus: Bus, growing: _Growing, name: str) -> None:
    """Print until the trajectory has a result or failed, or the run has ended."""
    newest = await read_last(bus, TRAJECTORY_PROGRESSED, name)
    subjects = [*bus.tables.subjects(TRAJECTORY_GENERATED, bus.run, name), PROGRESS_STORED.pattern(bus.run)]
    listeners = [
        Listener(bus, TRAJECTORIES, growing.take, lambda *_: None, subjects=subjects),
        Listener(bus, GRADES, growing.take, lambda *_: None, subjects=[TRAJECTORY_FAILED.subject(bus.run, name)]),
    ]
    waiting = [asyncio.create_task(growing.ended.wait()), asyncio.create_task(run_ended(bus))]
    try:
        await listeners[0].start(newest.sequence - 1 if newest is not None else 0)
        await listeners[1].start()
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        for listener in listeners:
            await listener.close()
