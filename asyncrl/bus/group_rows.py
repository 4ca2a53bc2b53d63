"""The rows of prompts as a reader of single trajectories finds them: each group stores them once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_next
from asyncrl.bus.publish import read
from asyncrl.errors import AsyncRLError
from topics.ids import trajectory_name
from topics.prompts import ONLY_TASK, PROMPT_ISSUED, PromptIssued, PromptRow
from topics.topic import PROMPTS
from topics.wire import WireError

_KEPT_GROUPS = 64  # members of a group arrive together; one that arrives much later costs a request


class RowsUnreadable(AsyncRLError):
    """The message that carries the rows of a group is missing, or cannot be read."""


class GroupRows:
    """Gives each issued trajectory its rows; remembers those of the groups seen last."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._rows: OrderedDict[str, asyncio.Future[list[PromptRow]]] = OrderedDict()  # by prompt id

    def learn(self, issued: PromptIssued) -> None:
        """Remember the rows that a message carries for the other members of its group."""
        if issued.rows and issued.group_size > 1:
            rows: asyncio.Future[list[PromptRow]] = asyncio.get_running_loop().create_future()
            rows.set_result(issued.rows)
            self._remember(issued.prompt_id, rows)

    async def of(self, issued: PromptIssued) -> list[PromptRow]:
        """The rows of a trajectory's prompt, read from the log unless they are cached.

        Raises:
            RowsUnreadable: the message that carries them is missing, or cannot be read.
            BusError: the server does not answer.
        """
        if issued.rows:
            return issued.rows
        if issued.prompt_id not in self._rows:  # concurrent requests of members wait for the same answer
            self._remember(issued.prompt_id, asyncio.create_task(self._read(issued.prompt_id, issued.task)))
        rows = self._rows[issued.prompt_id]
        return rows.result() if rows.done() else await asyncio.shield(rows)

    async def _read(self, prompt_id: str, task: str) -> list[PromptRow]:
        try:
            return await read_rows(self._bus, prompt_id, task)
        except BaseException:
            self._rows.pop(prompt_id, None)
            raise

    def _remember(self, prompt_id: str, rows: asyncio.Future[list[PromptRow]]) -> None:
        self._rows[prompt_id] = rows
        if len(self._rows) > _KEPT_GROUPS:
            self._rows.popitem(last=False)


async def read_rows(bus: Bus, prompt_id: str, task: str = ONLY_TASK) -> list[PromptRow]:
    """Read the rows of a prompt from the first message of its group's first member.

    Raises:
        RowsUnreadable: it is missing, or cannot be read.
        BusError: the server does not answer.
    """
    name = trajectory_name(prompt_id, 0)
    pool = bus.tables.pool_name(PROMPT_ISSUED, task)
    record = await read_next(bus, PROMPTS, PROMPT_ISSUED.subject(bus.run, name, pool), 1)
    if record is None:
        raise RowsUnreadable(f"the row of {prompt_id} is stored with {name}, which was never issued")
    where = f"with {name}, message {record.sequence} of {PROMPTS.name}"
    try:
        issued = await read(bus, PromptIssued, record)
    except (WireError, BlobMissing) as error:
        raise RowsUnreadable(f"the row of {prompt_id} is stored {where}, which cannot be read: {error}") from error
    if not issued.rows:
        raise RowsUnreadable(f"the row of {prompt_id} should be stored {where}, which carries none")
    return issued.rows
