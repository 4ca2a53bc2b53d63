"""Versions in memory that a server reads, filled before its requests are stopped: the load is a copy then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import structlog

from asyncrl.weights.sender_calls import Stage
from asyncrl.weights.sender_process import SenderFailed, SenderProcess

_TRIES = 3  # one after the other that may fail: each failure makes a version late by the start of a process
_SETTLED_S = 0.5  # after a load: the server's GPU may still read after its answer

log = structlog.get_logger()


class Staging:
    """The process that stages versions for one server, and its staged version."""

    def __init__(self, device: str, environment: Mapping[str, str], log_file: Path, deadline_s: float) -> None:
        self._device = device  # "cpu" or "cuda"
        self._environment = environment  # with which the process sees the server's GPU
        self._log_file = log_file
        self._deadline_s = deadline_s  # of a copy
        self.spare = 0  # bytes of the GPU that must stay free
        self._starting: asyncio.Task[SenderProcess] | None = None
        self._failures = 0  # one after the other
        self._directory = Path()  # that is staged
        self._packed = b""
        self._free_at = 0.0

    def start(self) -> None:
        """Start the process; its imports run in the background."""
        self._starting = asyncio.create_task(SenderProcess.start(self._log_file, self._environment))

    async def bring(self, directory: Path) -> None:
        """Copy the tensors of a directory; if that fails, the server reads the files."""
        self._packed = b""
        if self._failures >= _TRIES:
            return
        try:
            async with asyncio.timeout(self._deadline_s):
                await asyncio.sleep(self._free_at - time.monotonic())
                if self._starting is None:
                    self.start()
                assert self._starting is not None
                process = await self._starting
                self._packed = (await process.call(Stage(str(directory), self._device, self.spare))).packed
            self._directory, self._failures = directory, 0
        except (SenderFailed, OSError) as error:  # a TimeoutError is one
            self.fail(directory, error)

    def take(self, directory: Path) -> bytes:
        """Return the tensors of a directory in a form that the server can map; empty if they are not staged."""
        return self._packed if directory == self._directory else b""

    def settle(self) -> None:
        """Do not reuse the memory for a moment: the server has answered that it has loaded it."""
        self._free_at = time.monotonic() + _SETTLED_S

    def fail(self, directory: Path, error: Exception) -> None:
        """End a process whose tensors cannot be had; the next version gets another one, up to some failures."""
        self.close()
        self._failures += 1
        more = "" if self._failures < _TRIES else "; no further version will be"
        reason = (str(error) or type(error).__name__) + more
        log.warning("weights not staged", directory=str(directory), reason=reason)

    def close(self) -> None:
        """End the process."""
        starting, self._starting, self._packed = self._starting, None, b""
        if starting is not None:
            starting.cancel()
            if starting.done() and not starting.cancelled() and starting.exception() is None:
                starting.result().kill()
