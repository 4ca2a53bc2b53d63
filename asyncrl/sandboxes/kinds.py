"""Opening of sandboxes, and the end of those whose worker was killed."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from asyncrl.config.sandbox_settings import SandboxCapability, SandboxSettings, sandbox_kind
from asyncrl.sandboxes.control_groups import ControlGroups, group_parents
from asyncrl.sandboxes.leftovers import is_left
from asyncrl.sandboxes.remote import sandbox_of
from asyncrl.sandboxes.sandbox import Sandbox, SandboxError

_looked = False  # for what killed workers left


@asynccontextmanager
async def open_sandbox(
    settings: SandboxSettings, *, links: Mapping[str, str] | None = None, image: str = ""
) -> AsyncIterator[Sandbox]:
    """Start a sandbox, and destroy it at the end.

    Args:
        links: folders of the workspace by absolute paths at which programs find them too.
        image: that takes the place of `sandbox.image`.

    Raises:
        SandboxError: it does not start.
    """
    sandbox = await new_sandbox(settings_of_row(settings, links=links, image=image))
    await sandbox.start()
    try:
        yield sandbox
    finally:
        await asyncio.shield(sandbox.destroy())


def settings_of_row(settings: SandboxSettings, *, links: Mapping[str, str] | None, image: str) -> SandboxSettings:
    """Return the settings of a sandbox with what a row names, as `open_sandbox` takes it.

    Raises:
        SandboxError: sandboxes of this kind take no image of a row.
    """
    if image and SandboxCapability.IMAGES not in sandbox_kind(settings.kind).capabilities():
        raise SandboxError(f"a row names the image {image}; sandboxes of kind {settings.kind} take no image of a row")
    return msgspec.structs.replace(settings, image=image or settings.image, links={**settings.links, **(links or {})})


async def new_sandbox(settings: SandboxSettings) -> Sandbox:
    """Return a sandbox, not started. The first one of a process ends what killed workers have left.

    Raises:
        SandboxError: its kind cannot do what the settings ask for.
    """
    global _looked
    if not _looked:
        _looked = True
        await end_leftovers()
        await asyncio.to_thread(sandbox_kind(settings.kind).end_leftovers)
    sandbox = sandbox_of(settings)
    if settings.links and SandboxCapability.LINKS not in sandbox.capabilities:
        raise SandboxError("its programs find no folder of the workspace at another path, such as /tests")
    if fault := await asyncio.to_thread(sandbox_kind(settings.kind).prepare, settings):
        raise SandboxError(fault)
    return sandbox


async def end_leftovers() -> list[str]:
    """End all processes, and remove all files, of sandboxes whose workers were killed; returns their names.

    A sandbox ends with its worker. Left are groups without processes, and sandboxes whose first process was killed too.
    """
    groups = [folder for parent in set(group_parents().values()) for folder in _left_in(parent)]
    folders = _left_in(Path(tempfile.gettempdir()))
    await ControlGroups(groups).end()
    for folder in folders:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    return sorted({left.name for left in (*groups, *folders)})


def _left_in(parent: Path) -> list[Path]:
    return [folder for folder in parent.iterdir() if is_left(folder.name)]
