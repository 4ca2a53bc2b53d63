"""Rows for an actor, made in a process that ends with it and whose faults are the actor's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from actors.runtime.actor import ActorDown, ActorFault, Context
from asyncrl.data.protocol import DataError
from asyncrl.data.row_maker import RowMaker, RowMakerDown, RowSetup


@asynccontextmanager
async def open_rows(
    context: Context, spec: str, seed: int, labels_for: str, *, on_rows: Callable[[], None] = lambda: None
) -> AsyncIterator[RowMaker]:
    """The rows of a data source for the length of the block.

    Args:
        labels_for: what reads the labels of its rows, as for `open_source`.

    Raises:
        ActorFault: the data cannot serve.
        ActorDown: the process that makes rows ended.
    """
    task = context.config.task
    setup = RowSetup(spec, task.options, seed, str(context.files.base), labels_for)
    with as_faults():
        rows = await RowMaker.open(setup, limit_s=task.row_limit_s, on_rows=on_rows)
    try:
        yield rows
    finally:
        await rows.close()


@contextmanager
def as_faults() -> Iterator[None]:
    """Let what goes wrong with rows in the block end the actor with its reason."""
    try:
        yield
    except DataError as error:
        raise ActorFault(str(error)) from error
    except RowMakerDown as error:
        raise ActorDown(str(error)) from error
