"""Starting an inference server as a child process: the embedded engine, or SGLang."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from asyncrl.config.settings import EngineSettings
from asyncrl.engine.client import EngineClient
from asyncrl.files import write_private
from asyncrl.ports import free_port
from asyncrl.process import end, log_size, log_tail, python, state_of, with_parent

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else a paused server answers /health after 20 s, with 503
}


class EngineFailed(Exception):
    """A server did not start, or died; the message holds its last output."""


class EngineProcess:
    """A server process of our own."""

    def __init__(self, settings: EngineSettings, log_file: Path, key_file: Path | None) -> None:
        """
        Args:
            log_file: of its output.
            key_file: holds the API key that it asks for; none for a server that asks for none.
        """
        self._settings = settings
        self._log_file = log_file
        self._key_file = key_file
        self._logged = 0  # bytes in the log before the server was started
        self._process: asyncio.subprocess.Process | None = None
        self.address = ""

    async def start(self, model: Path, version: str) -> str:
        """Start the server on `model` under the name `version`; returns its address once it answers.

        Raises:
            EngineFailed: it ended, or does not answer within the start deadline.
        """
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        self._logged = log_size(self._log_file)
        # SGLang writes its arguments into its output, the key among them.
        with os.fdopen(os.open(self._log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *python(*self._arguments(model, version, port)),
                stdout=log,
                stderr=log,
                env={**os.environ, **_ENVIRONMENT, **self._settings.environment},
                preexec_fn=with_parent(),
            )
        client = EngineClient(self.address, api_key=self._key or None, control_timeout_s=30)
        ended = asyncio.create_task(self._process.wait())
        try:
            async with asyncio.timeout(self._settings.start_deadline_s):
                # A server does not announce that it is up; asking its port is the only way to know.
                while not await client.health():
                    if ended.done():
                        raise EngineFailed(f"the server ended with code {ended.result()}: {self._last_lines()}")
                    await asyncio.wait({ended}, timeout=0.05)
        except TimeoutError:
            await self.stop()
            raise EngineFailed(
                f"the server did not answer within {self._settings.start_deadline_s:.0f} s: {self._last_lines()}"
            ) from None
        finally:
            ended.cancel()
            await client.close()
        return self.address

    async def wait(self) -> str:
        """Wait until the server ends; returns its last output."""
        assert self._process is not None
        code = await self._process.wait()
        return f"exit code {code}: {self._last_lines()}"

    @property
    def frozen(self) -> bool:
        """Return whether its process is stopped (Linux)."""
        return self._process is not None and state_of(self._process.pid) == "stopped"

    def kill(self) -> None:
        """End a server that does not answer."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """End the server."""
        if self._process is not None:
            await end(self._process)

    @property
    def _key(self) -> str:
        return self._key_file.read_text().strip() if self._key_file is not None else ""

    def _arguments(self, model: Path, version: str, port: int) -> list[str]:
        settings = self._settings
        module = "asyncrl.engine.embedded" if settings.kind == "embedded" else "sglang.launch_server"
        arguments = ["-m", module, "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
        arguments += ["--weight-version", version, "--max-running-requests", str(settings.max_running)]
        arguments += ["--incremental-streaming-output"]
        if settings.context:
            arguments += ["--context-length", str(settings.context)]
        if self._key_file is not None:
            arguments += self._key_arguments(self._key_file)
        return [*arguments, *settings.arguments]

    def _key_arguments(self, key_file: Path) -> list[str]:
        """Return the arguments that give the server its key: by file, since every user may read a command line."""
        if self._settings.kind == "embedded":
            return ["--api-key-file", str(key_file)]
        options = self._log_file.with_suffix(".yaml")
        write_private(options, f"api-key: {json.dumps(self._key)}\n".encode())
        return ["--config", str(options)]

    def _last_lines(self) -> str:
        return log_tail(self._log_file, self._logged)
