"""Making the untrained model of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path

from asyncrl.config.settings import Config
from asyncrl.errors import AsyncRLError
from asyncrl.training.create import create_configured


class LaunchError(AsyncRLError):
    """The run cannot start."""


async def make_model(directory: Path, config: Config) -> None:
    """Make the untrained model that a config describes, on a thread.

    Raises:
        LaunchError: it could not be made.
    """
    try:
        await asyncio.to_thread(create_configured, directory, config)
    except (OSError, ValueError) as error:
        raise LaunchError(f"the model could not be made: {error}") from error
