"""Dead letters of a run: unreadable messages, and work that killed worker after worker; and their recovery."""

from __future__ import annotations

import contextlib
import time
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from asyncrl.bus.acks import MESSAGE_ID
from asyncrl.bus.connection import Bus
from asyncrl.bus.group_rows import GroupRows, RowsUnreadable
from asyncrl.bus.log import Record, read_last, read_last_of_each, read_message
from asyncrl.bus.merged_reader import Part, read_merged
from asyncrl.bus.publish import publish
from asyncrl.errors import AsyncRLError
from asyncrl.state.format_message import FormattedMessage, as_json
from topics.actors import DEAD_LETTER, DeadLetter, ReissueRequested
from topics.groups import GROUP_DROPPED
from topics.ids import REISSUE, TASK, is_prompt_id, prompt_of, trajectory_name
from topics.prompts import PROMPT_ISSUED, PromptIssued
from topics.topic import BATCHES, DEAD, Topic
from topics.trajectories import TRAJECTORY_DROPPED


class Letter(NamedTuple):
    """A dead letter."""

    number: int  # its place on the log of dead letters
    letter: DeadLetter
    time_ns: int  # server's clock

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

    async def in_full(self, bus: Bus) -> dict[str, Any]:
        """JSON values of its record: its message if it can be read, otherwise its bytes as base64."""
        subject = f"asyncrl.-.{self.letter.topic}.{self.letter.headers.get('trajectory', '')}"
        formatted = FormattedMessage(subject, self.letter.headers, self.letter.body, self.time_ns)
        decoded = msgspec.json.decode(as_json(formatted))
        body = {} if formatted.message is not None else {"body": self.letter.body}
        if isinstance(formatted.message, PromptIssued):
            with contextlib.suppress(RowsUnreadable):  # then it is shown without
                decoded["message"]["rows"] = await GroupRows(bus).of(formatted.message)
        return {**self.figures(), "headers": self.letter.headers, "message": decoded["message"], **body}


async def read_letters(bus: Bus) -> list[Letter]:
    """Every dead letter of a run, in order."""
    found: list[Letter] = []

    def apply(_topic: Topic[Any], message: DeadLetter, record: Record) -> None:
        found.append(Letter(record.sequence, message, record.time_ns))

    def refuse(record: Record, error: Exception) -> None:  # a dead letter that cannot be read itself
        letter = DeadLetter("message.rejected", DEAD.name, record.sequence, str(error), record.headers, record.data)
        found.append(Letter(record.sequence, letter, record.time_ns))

    await read_merged(bus, [Part(DEAD, subjects=[DEAD_LETTER.pattern(bus.run)])], apply, refuse)
    return found


async def letter_numbered(bus: Bus, number: int) -> Letter:
    """Return a dead letter by its number.

    Raises:
        AsyncRLError: no item has this number.
    """
    for letter in await read_letters(bus):
        if letter.number == number:
            return letter
    raise AsyncRLError(f"there is no dead letter {number}")


async def reissue(bus: Bus, name: str) -> str:
    """Recover one item: a prompt's row as a new group, or an unreadable message's bytes; returns a description.

    Args:
        name: `p000042`, `p000042-3`, or the number of a dead letter.

    Raises:
        AsyncRLError: there is nothing to bring back, or it must not be.
    """
    if not name.isdecimal():
        return await _reissue_prompt(bus, name)
    letter = await letter_numbered(bus, int(name))
    if letter.letter.poison:
        return await _reissue_prompt(bus, letter.letter.headers.get("trajectory", name))
    return await _publish_again(bus, letter)


async def _reissue_prompt(bus: Bus, name: str) -> str:
    prompt_id = prompt_of(name)
    if not is_prompt_id(prompt_id, TASK + REISSUE):
        raise AsyncRLError(f"{name!r} is no prompt of RL; their ids look like p000042")
    issued = await read_last(bus, PROMPT_ISSUED, trajectory_name(prompt_id, 0))
    if issued is None:
        raise AsyncRLError(f"{prompt_id} was never issued")
    members = range(int(issued.headers["group-size"]))
    ends = [TRAJECTORY_DROPPED.subject(bus.run, trajectory_name(prompt_id, member)) for member in members]
    if not await read_last_of_each(bus, BATCHES, [GROUP_DROPPED.subject(bus.run, prompt_id), *ends]):
        raise AsyncRLError(f"{prompt_id} is not issued again: neither it nor one of its trajectories was dropped")
    await publish(bus, ReissueRequested(prompt_id))
    return f"{prompt_id} is issued again as a new group, as soon as there is credit"


async def _publish_again(bus: Bus, letter: Letter) -> str:
    """Put an unreadable message on its log again: a present consumer may be able to read it."""
    rejected = letter.letter
    stream = next((stream for stream in bus.tables.streams if stream.name == rejected.stream), None)
    where = f"message {rejected.sequence} of {rejected.stream}"
    if stream is None or stream.keeper:
        raise AsyncRLError(f"{where} is not published again: only the keeper of a log writes it")
    record = await read_message(bus, stream, rejected.sequence)
    if record is None:
        raise AsyncRLError(f"{where} is not there any more")
    headers = {key: value for key, value in record.headers.items() if not key.startswith("Nats-")}
    headers[MESSAGE_ID] = f"{rejected.topic}:again:{letter.number}:{time.time_ns()}"
    ack = await bus.store(record.subject, record.data, headers)
    return f"{where} is published again as message {ack.seq}"
