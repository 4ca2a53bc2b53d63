"""Making the untrained model of a run, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from asyncrl.errors import AsyncRLError
from asyncrl.process import ChildProcess, python


class LaunchError(AsyncRLError):
    """The run cannot start."""


async def create_model_aside(config: Path, directory: Path) -> None:
    """Make the untrained model of a `config.json` in a process of its own: this one stays small.

    Raises:
        LaunchError: it could not be made.
    """
    command = python("-m", "asyncrl.training.create", str(config), str(directory))
    child = await ChildProcess.start(command, piped=True)
    try:
        _, output = await child.process.communicate()
    finally:
        child.kill()  # where a start that failed does not wait for it
    if child.process.returncode:
        raise LaunchError(f"the model could not be made: {output.decode(errors='replace').strip()[-500:]}")
