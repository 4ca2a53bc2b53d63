"""Opening of sandboxes."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from asyncrl.config.sandbox_settings import SandboxSettings
from asyncrl.sandboxes.control_groups import end_group, group_parents
from asyncrl.sandboxes.leftovers import is_left
from asyncrl.sandboxes.sandbox import Sandbox
from asyncrl.sandboxes.served import ServedSandbox


@asynccontextmanager
async def open_sandbox(settings: SandboxSettings) -> AsyncIterator[Sandbox]:
    """Start a sandbox, and destroy it at the end.

    Raises:
        SandboxError: it does not start.
    """
    sandbox = ServedSandbox(settings)
    await sandbox.start()
    try:
        yield sandbox
    finally:
        await asyncio.shield(sandbox.destroy())


def end_leftovers() -> list[str]:
    """End all processes, and remove all files, of sandboxes whose workers were killed; returns their names.

    A sandbox ends with its worker. Left are groups without processes, and sandboxes whose first process was killed too.
    """
    groups = [folder for parent in set(group_parents().values()) for folder in parent.iterdir() if is_left(folder.name)]
    for group in groups:
        end_group(group)
    folders = [folder for folder in Path(tempfile.gettempdir()).iterdir() if is_left(folder.name)]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return sorted({left.name for left in (*groups, *folders)})
