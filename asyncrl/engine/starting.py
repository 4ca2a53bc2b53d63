"""The start of a server at a free port, on its own GPUs, until it answers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from asyncrl.engine.errors import EngineError
from asyncrl.engine.sglang.arguments import FRONTS
from asyncrl.errors import AsyncRLError
from asyncrl.host import VISIBLE_GPUS
from asyncrl.ports import Listen, free_port, listen_problem
from asyncrl.process import ChildProcess

if TYPE_CHECKING:
    from asyncrl.engine.client import EngineClient

_TRIES = 5
_TAKEN = "address already in use"  # in the output of a server, of whichever of its ports


class EngineFailed(AsyncRLError):
    """A server did not start, or ended; the message holds its last output."""


async def start_at_free_port(
    name: str,
    place: Listen,
    launch: Callable[[int], Awaitable[ChildProcess]],
    answers: Callable[[], Awaitable[bool]],
    deadline_s: float,
) -> None:
    """Start a server, and return when it answers; choose other ports if a free one is taken.

    Args:
        place: the port was free.
        launch: starts the process, which listens on a port of that host, and chooses its other ports each time.
        deadline_s: for each start.

    Raises:
        EngineFailed: it ended, or did not answer within the deadline.
    """
    for more in reversed(range(_TRIES)):
        if listen_problem(*place):
            place = place._replace(port=free_port(place.host))
        process = await launch(place.port)
        try:
            await wait_for_answer(name, process, answers, deadline_s)
        except EngineFailed as error:
            taken = _TAKEN in str(error).lower() or listen_problem(*place)
            if not more or process.returncode is None or not taken:
                raise
        else:
            return


async def end_of(process: ChildProcess) -> str:
    """Return the exit code and last output of a process that has ended."""
    return f"exit code {await process.wait()}: {process.last_lines}"


async def wait_for_answer(
    name: str, process: ChildProcess, answers: Callable[[], Awaitable[bool]], deadline_s: float
) -> None:
    """Wait until a process that was started answers.

    Raises:
        EngineFailed: it ended, or did not answer within the deadline.
    """
    ended, answering = asyncio.create_task(end_of(process)), asyncio.create_task(_until(answers))
    try:
        async with asyncio.timeout(deadline_s):
            # Who has its port may take the question and never answer it.
            await asyncio.wait({ended, answering}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise EngineFailed(f"the {name} ended: {ended.result()}")
        await answering
    except TimeoutError:
        words = f"the {name} did not answer within {deadline_s:.0f} s: {process.last_lines}"
        raise EngineFailed(words) from None
    finally:
        ended.cancel()
        answering.cancel()


async def _until(answers: Callable[[], Awaitable[bool]]) -> None:
    while not await answers():  # noqa: ASYNC110 - a server does not announce that it is up
        await asyncio.sleep(0.05)


async def check_front(server: EngineClient) -> None:
    """Check that one process alone of a server that its owner has started takes requests and hands out tokens.

    SGLang tells the name of new weights only to that of them which took the call, and the others label their tokens
    with the one before. A server that does not tell its arguments now is met by its labels later.

    Raises:
        EngineFailed: there are several.
    """
    try:
        several = (await server.server_info()).get(FRONTS.strip("-").replace("-", "_"))
    except EngineError:
        return
    if isinstance(several, int) and several > 1:
        raise EngineFailed(
            f"it has {FRONTS} {several}: only one of these processes learns the name of new weights, and the others "
            "answer under the old one; start it without that, or start several servers"
        )


def name_of_gpu(number: int) -> str:
    """Return the name of a GPU for a child process, by its number among those that this process sees.

    Raises:
        EngineFailed: this process does not see this many.
    """
    seen = os.environ.get(VISIBLE_GPUS)
    if seen is None:
        return str(number)
    names = [name.strip() for name in seen.split(",") if name.strip()]
    if number >= len(names):
        raise EngineFailed(
            f"engine.gpus names GPU {number}, but {VISIBLE_GPUS} = {seen!r} shows {len(names)} to this run"
        )
    return names[number]
