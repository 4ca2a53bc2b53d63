"""Inference servers under the control of their engine actor: one class for each `engine.kind`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from asyncrl.config.settings import EngineSettings
from asyncrl.engine.client import EngineClient, EngineLoad
from asyncrl.engine.fleet import Sampler
from asyncrl.engine.scripted import ScriptedClient
from asyncrl.errors import AsyncRLError
from asyncrl.files import write_private
from asyncrl.ports import free_port
from asyncrl.process import ChildProcess, python, state_of

_ADDRESS = re.compile(r"^https?://([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:\d{1,5})?(/[\w./-]*)?\Z", re.ASCII)
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else a paused server answers /health after 20 s, with 503
}


class EngineFailed(AsyncRLError):
    """A server did not start, or ended; the message holds its last output."""


class EngineHome(NamedTuple):
    """The arguments of a server's start."""

    name: str  # "engine-2"
    settings: EngineSettings
    model: Path  # directory that it starts from
    log_file: Path  # of its output
    key_file: Path | None  # holds the API key that it asks for; None for a server that asks for none

    @property
    def key(self) -> str | None:
        """The API key."""
        return self.key_file.read_text().strip() if self.key_file is not None else None


class EngineControl(Protocol):
    """One inference server, as its engine actor controls it. The defaults are those of a server started elsewhere.

    Raises, from every coroutine:
        EngineError: the server does not do it, or does not answer.
    """

    address: str  # where rollout workers reach it
    own: bool = False  # it was started here, and ends with `close`

    @property
    def frozen(self) -> bool:
        """Return whether its process is stopped, as far as that can be seen from here."""
        return False

    async def start(self) -> None:
        """Start the server and return when it answers; raises EngineFailed."""

    async def ended(self) -> str:
        """Return when the server has ended, with its last output; never, where that cannot be seen from here."""
        await asyncio.Event().wait()
        return ""

    async def health(self) -> bool:
        """Return whether it answers and is well."""
        ...

    async def label(self) -> str:
        """Return the name of its weights."""
        ...

    async def load(self) -> EngineLoad:
        """Return its load at this moment."""
        ...

    async def hold(self) -> None:
        """End all requests, which return with their partial tokens, and sample nothing until `resume`."""

    async def load_weights(self, directory: Path, key: str) -> None:
        """Load weights, and call them `key` from here on; the server is held."""

    async def resume(self) -> None:
        """Sample again."""

    def kill(self) -> None:
        """End a server of our own that does not answer."""

    async def close(self) -> None:
        """Release the server; end one of our own."""


class ExternalControl(EngineClient, EngineControl):
    """A server that somebody else has started, at the address that the settings give."""

    def __init__(self, home: EngineHome, address: str = "") -> None:
        settings, number = home.settings, int(home.name.rsplit("-", 1)[1])
        address = address or settings.addresses[number - 1]
        super().__init__(address, api_key=home.key, control_timeout_s=settings.update_deadline_s)

    async def hold(self) -> None:
        """Abort all requests and freeze the sampler."""
        await self.empty()
        await self.pause("in_place")

    async def load_weights(self, directory: Path, key: str) -> None:
        """Load from files: nothing runs, old caches stay under their own `extra_key` and need no flush."""
        await self.update_weights(directory, key, False)

    async def resume(self) -> None:
        """Sample again."""
        await self.continue_generation()


class EmbeddedControl(ExternalControl):
    """The CPU engine, as a process of our own."""

    own = True
    module = "asyncrl.engine.embedded"

    def __init__(self, home: EngineHome) -> None:
        self._port = free_port()
        super().__init__(home, f"http://127.0.0.1:{self._port}")
        self._home = home
        self._process: ChildProcess | None = None

    async def start(self) -> None:
        """Start the server on the run's first weights under the name `none`."""
        home, settings = self._home, self._home.settings
        # SGLang writes its arguments into its output, the key among them: only its owner reads the log.
        environment = {**_ENVIRONMENT, **settings.environment}
        process = await ChildProcess.start(python(*self.arguments()), log=home.log_file, environment=environment)
        self._process = process
        ended = asyncio.create_task(self.ended())
        try:
            async with asyncio.timeout(settings.start_deadline_s):
                # A server does not announce that it is up; asking its port is the only way to know.
                while not await self.health():
                    if ended.done():
                        raise EngineFailed(f"the server ended: {ended.result()}")
                    await asyncio.wait({ended}, timeout=0.05)
        except TimeoutError:
            words = f"the server did not answer within {settings.start_deadline_s:.0f} s: {process.last_lines}"
            raise EngineFailed(words) from None
        finally:
            ended.cancel()

    async def ended(self) -> str:
        """Return its exit code and last output."""
        assert self._process is not None
        return f"exit code {await self._process.wait()}: {self._process.last_lines}"

    @property
    def frozen(self) -> bool:
        """Return whether its process is stopped (Linux)."""
        return self._process is not None and state_of(self._process.pid) == "stopped"

    def kill(self) -> None:
        """Kill its process."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """End the server."""
        await super().close()
        if self._process is not None:
            await self._process.end()

    def arguments(self) -> list[str]:
        """Return the command line of the server, after `python`."""
        home, settings = self._home, self._home.settings
        arguments = ["-m", self.module, "--model-path", str(home.model), "--host", "127.0.0.1"]
        arguments += ["--port", str(self._port), "--weight-version", "none"]
        arguments += ["--max-running-requests", str(settings.max_running), "--incremental-streaming-output"]
        if settings.context:
            arguments += ["--context-length", str(settings.context)]
        if home.key_file is not None:
            arguments += self.key_arguments(home.key_file)
        return [*arguments, *settings.arguments]

    def key_arguments(self, key_file: Path) -> list[str]:
        """Return the arguments that give the server its key: by file, since every user may read a command line."""
        return ["--api-key-file", str(key_file)]


class SGLangControl(EmbeddedControl):
    """SGLang, as a process of our own."""

    module = "sglang.launch_server"

    def key_arguments(self, key_file: Path) -> list[str]:
        """Return the name of an options file that holds the key."""
        options = self._home.log_file.with_suffix(".yaml")
        write_private(options, f"api-key: {json.dumps(self._home.key)}\n".encode())
        return ["--config", str(options)]


class ScriptedControl(EngineControl):
    """No server at all: the clients of its address make tokens up, and label them as is announced."""

    def __init__(self, home: EngineHome) -> None:
        self.address = f"scripted:{home.name}"
        self._label = "none"

    async def health(self) -> bool:
        """It is always well."""
        return True

    async def label(self) -> str:
        """Return what was loaded last."""
        return self._label

    async def load(self) -> EngineLoad:
        """It has no requests itself."""
        return EngineLoad(0, 0)

    async def load_weights(self, directory: Path, key: str) -> None:
        """Take the name."""
        self._label = key


def _http_client(settings: EngineSettings, address: str, key: str | None) -> Sampler:
    if not _ADDRESS.match(address):
        raise ValueError(f"{address!r} is no address of an engine; expected http://host:port")
    return EngineClient(address, api_key=key)


def _scripted_client(settings: EngineSettings, address: str, key: str | None) -> Sampler:
    mean_s, sigma, tokens = settings.scripted_mean_s, settings.scripted_sigma, settings.scripted_tokens
    return ScriptedClient(mean_s=mean_s, sigma=sigma, tokens=tokens)


class EngineKind(NamedTuple):
    """Control of the servers of one `engine.kind`, and the client that samples from them."""

    control: Callable[[EngineHome], EngineControl]
    client: Callable[[EngineSettings, str, str | None], Sampler]  # of settings, address and key


KINDS = {
    "embedded": EngineKind(EmbeddedControl, _http_client),
    "sglang": EngineKind(SGLangControl, _http_client),
    "external": EngineKind(ExternalControl, _http_client),
    "scripted": EngineKind(ScriptedControl, _scripted_client),
}
