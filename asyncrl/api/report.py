"""The report of a run, live or over."""

from __future__ import annotations

from pathlib import Path

from asyncrl.api.status import read_status
from asyncrl.page.report import write_report
from asyncrl.run.connect import FoundRun, opened


async def write_run_report(found: FoundRun, path: Path) -> None:
    """Write the page of a run with the data inside.

    Raises:
        RunNotFound: the run cannot be reached.
        BusError: its topics cannot be read.
        OSError: the file cannot be written.
    """
    status = await read_status(found)
    files = found.files if found.root is not None else None
    model = files.model_path(files.read_config().model) if files is not None else None
    async with opened(found, "report") as bus:
        await write_report(path, bus, status, model, files.metrics if files is not None else None)
