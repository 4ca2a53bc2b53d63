"""`asyncrl dead`: list unreadable messages and prompts that killed worker after worker, and recover them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from datetime import datetime
from typing import Any

import msgspec

from asyncrl.bus.connection import Bus
from asyncrl.bus.group_rows import GroupRows, RowsUnreadable
from asyncrl.bus.listen import read_log
from asyncrl.bus.log import Record, read_last, read_last_of_each, read_message
from asyncrl.bus.publish import MESSAGE_ID, publish
from asyncrl.cli.find import find_run
from asyncrl.cli.options import add_run
from asyncrl.cli.reach import reached
from asyncrl.errors import AsyncRLError
from asyncrl.run.connect import connected
from asyncrl.state.format_message import FormattedMessage, as_json
from topics.actors import DEAD_LETTER, DeadLetter, ReissueRequested
from topics.groups import GROUP_DROPPED
from topics.prompts import PROMPT_ISSUED, PromptIssued
from topics.topic import BATCHES, DEAD, PROMPTS, STREAMS, Topic
from topics.trajectories import TRAJECTORY_DROPPED


class NotReissued(AsyncRLError):
    """Nothing can be issued again there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON array")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print dead letter N in full")
    parser.add_argument(
        "--reissue",
        nargs="+",
        default=[],
        metavar="NAME",
        help="issue again: a prompt or trajectory (p000042, p000042-3) that came to nothing, or dead letter N",
    )


def run(arguments: argparse.Namespace) -> int:
    """List, show, or issue again."""
    if arguments.reissue:
        print("\n".join(asyncio.run(_reissue_all(arguments))))
        return 0
    if arguments.show:
        print(msgspec.json.format(asyncio.run(_show(arguments))).decode())
        return 0
    found = asyncio.run(_read(arguments))
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode([letter.figures() for letter in found])).decode())
    else:
        print("\n".join(map(str, found)) or "no dead letters")
    return 0


class Letter:
    """A dead letter and its number: its place on the log of dead letters."""

    def __init__(self, number: int, letter: DeadLetter, time_ns: int) -> None:
        self.number = number
        self.letter = letter
        self.time_ns = time_ns

    def __str__(self) -> str:
        clock = datetime.fromtimestamp(self.time_ns / 1e9).strftime("%H:%M:%S")
        letter = self.letter
        where = f"{letter.topic}, {letter.sequence} of {letter.stream}"
        return f"{self.number:>5}  {clock}  {where:<40}  {len(letter.body):>6,} bytes  {letter.reason}"

    def figures(self) -> dict[str, Any]:
        """Return its line in the list."""
        letter = self.letter
        return {
            "number": self.number,
            "time_s": self.time_ns / 1e9,
            "topic": letter.topic,
            "stream": letter.stream,
            "sequence": letter.sequence,
            "trajectory": letter.headers.get("trajectory", ""),
            "reason": letter.reason,
            "poison": letter.poison,
            "bytes": len(letter.body),
        }

    async def in_full(self, bus: Bus) -> bytes:
        """JSON of all that is kept of it: its message where it can be read, else its bytes as base64."""
        subject = f"asyncrl.-.{self.letter.topic}.{self.letter.headers.get('trajectory', '')}"
        tapped = FormattedMessage(subject, self.letter.headers, self.letter.body, self.time_ns)
        decoded = msgspec.json.decode(as_json(tapped))
        body = {} if tapped.message is not None else {"body": self.letter.body}
        if isinstance(tapped.message, PromptIssued):
            with contextlib.suppress(RowsUnreadable):  # then it is shown without
                decoded["message"]["rows"] = await GroupRows(bus).of(tapped.message)
        values = {**self.figures(), "headers": self.letter.headers, "message": decoded["message"], **body}
        return msgspec.json.encode(values)


class _Letters:
    """Takes in the log of dead letters."""

    def __init__(self) -> None:
        self.found: list[Letter] = []

    def apply(self, topic: Topic[Any], message: Any, record: Record) -> None:
        """One more."""
        self.found.append(Letter(record.sequence, message, record.time_ns))

    def refuse(self, record: Record, error: Exception) -> None:
        """A dead letter that is none itself."""
        letter = DeadLetter("message.rejected", DEAD.name, record.sequence, str(error), record.headers, record.data)
        self.found.append(Letter(record.sequence, letter, record.time_ns))


async def read_letters(bus: Bus) -> list[Letter]:
    """Every dead letter of a run, in order."""
    letters = _Letters()
    await read_log(bus, DEAD, [DEAD_LETTER.pattern(bus.run)], letters)
    return letters.found


async def reissue(bus: Bus, name: str) -> str:
    """Recover one item: a prompt's row as a new group, or an unreadable message's bytes; returns what was done.

    Args:
        name: `p000042`, `p000042-3`, or the number of a dead letter.

    Raises:
        NotReissued: there is nothing to bring back, or it must not be.
    """
    if not name.isdecimal():
        return await _reissue_prompt(bus, name)
    letter = next((letter for letter in await read_letters(bus) if letter.number == int(name)), None)
    if letter is None:
        raise NotReissued(f"there is no dead letter {name}")
    if letter.letter.poison:
        return await _reissue_prompt(bus, letter.letter.headers.get("trajectory", name))
    return await _publish_again(bus, letter)


async def _reissue_prompt(bus: Bus, name: str) -> str:
    prompt_id = name.rsplit("-", 1)[0]
    if prompt_id[:1] not in ("p", "r") or not prompt_id[1:].isdecimal():
        raise NotReissued(f"{name!r} is no prompt of RL; they are called as p000042 is")
    issued = await read_last(bus, PROMPTS, PROMPT_ISSUED.subject(bus.run, f"{prompt_id}-0"))
    if issued is None:
        raise NotReissued(f"{prompt_id} was never issued")
    members = range(int(issued.headers["group-size"]))
    ends = [TRAJECTORY_DROPPED.subject(bus.run, f"{prompt_id}-{member}") for member in members]
    if not await read_last_of_each(bus, BATCHES, [GROUP_DROPPED.subject(bus.run, prompt_id), *ends]):
        raise NotReissued(f"{prompt_id} is not issued again: neither it nor one of its trajectories was dropped")
    await publish(bus, ReissueRequested(prompt_id))
    return f"{prompt_id} is issued again as a new group, as soon as there is credit"


async def _publish_again(bus: Bus, letter: Letter) -> str:
    """Put an unreadable message on its log again: a present consumer may be able to read it."""
    rejected = letter.letter
    stream = next((stream for stream in STREAMS if stream.name == rejected.stream), None)
    where = f"message {rejected.sequence} of {rejected.stream}"
    if stream is None or stream.keeper:
        raise NotReissued(f"{where} is not published again: only the keeper of a log writes it")
    record = await read_message(bus, stream, rejected.sequence)
    if record is None:
        raise NotReissued(f"{where} is not there any more")
    headers = {key: value for key, value in record.headers.items() if not key.startswith("Nats-")}
    headers[MESSAGE_ID] = f"{rejected.topic}:again:{letter.number}:{time.time_ns()}"
    ack = await bus.store(record.subject, record.data, headers)
    return f"{where} is published again as message {ack.seq}"


async def _read(arguments: argparse.Namespace) -> list[Letter]:
    async with reached(arguments, "dead") as bus:
        return await read_letters(bus)


async def _show(arguments: argparse.Namespace) -> bytes:
    async with reached(arguments, "dead") as bus:
        for letter in await read_letters(bus):
            if letter.number == arguments.show:
                return await letter.in_full(bus)
    raise AsyncRLError(f"there is no dead letter {arguments.show}")


async def _reissue_all(arguments: argparse.Namespace) -> list[str]:
    async with connected(find_run(arguments), "dead") as bus:
        return [await reissue(bus, name) for name in arguments.reissue]
