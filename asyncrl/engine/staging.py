"""Versions in memory that a server reads, filled before its requests are stopped: the load is a copy then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import structlog

from asyncrl.weights.sender_calls import Stage
from asyncrl.weights.sender_process import SenderFailed, SenderProcess

_SETTLED_S = 0.5  # after a load: the server's GPU may read for a moment behind its answer

log = structlog.get_logger()


class Staging:
    """The process that holds the version of one server beside it, and what it holds."""

    def __init__(self, device: str, environment: Mapping[str, str], log_file: Path, deadline_s: float) -> None:
        """
        Args:
            device: "cpu" or "cuda".
            environment: with which the process sees the server's GPU.
            deadline_s: of a copy.
        """
        self._device = device
        self._environment = environment
        self._log_file = log_file
        self._deadline_s = deadline_s
        self._process: SenderProcess | None = None
        self._directory = Path()  # that is staged
        self._packed = b""
        self._free_at = 0.0

    async def bring(self, directory: Path) -> None:
        """Copy the tensors of a directory; where that fails, the server reads the files."""
        self._packed = b""
        try:
            async with asyncio.timeout(self._deadline_s):
                await asyncio.sleep(self._free_at - time.monotonic())
                if self._process is None:
                    self._process = await SenderProcess.start(self._log_file, self._environment)
                self._packed = (await self._process.call(Stage(str(directory), self._device))).packed
            self._directory = directory
        except (SenderFailed, OSError) as error:  # a TimeoutError is one
            self.fail(directory, error)

    def take(self, directory: Path) -> bytes:
        """Return the tensors of a directory as the server can map them; nothing where they are not there."""
        self._free_at = time.monotonic() + _SETTLED_S
        return self._packed if directory == self._directory else b""

    def fail(self, directory: Path, error: Exception) -> None:
        """End a process whose tensors cannot be had; the next version gets another one."""
        self.close()
        log.warning("weights not staged", directory=str(directory), reason=str(error) or type(error).__name__)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
        self._process, self._packed = None, b""
