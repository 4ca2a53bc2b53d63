"""Inference servers under the control of their engine actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple, Protocol

from asyncrl.config.engine_settings import EngineGroup, EngineSettings
from asyncrl.engine.lora_serving import Shape
from asyncrl.engine.server_load import EngineLoad
from asyncrl.ports import LOOPBACK
from topics.roles import number_in_pool


class ServerSpec(NamedTuple):
    """The arguments of a server's start."""

    name: str  # "engine-2", or "engine-large-2" of several groups
    settings: EngineSettings
    model: Path  # directory that it starts from
    log_file: Path  # of its output
    key_file: Path | None  # holds the API key that it asks for; None for a server that asks for none
    address: str = ""  # of a server that was announced during the run
    label: str = "none"  # of the weights that it starts with
    priorities: bool = False  # some requests come before others
    form: str = "model"  # of versions: `weights.format`
    host: str = LOOPBACK  # IP address of this host that it listens on
    gap_s: float = 0.0  # for which an update waits for a moment without requests of clients
    staged: bool = False  # versions are staged in memory before its requests stop
    memory: float = 0.0  # part of its GPU's memory that it may take; 0: as its arguments say
    serves: Shape | None = None  # adapters that it adds to its model at each token; None: its versions are whole models

    @property
    def key(self) -> str | None:
        """The API key."""
        return read_key(self.key_file)

    @property
    def group(self) -> EngineGroup:
        """The settings of its group."""
        return self.settings.group_of(self.name)

    @property
    def number(self) -> int:
        """Its number in its group, from 0."""
        return number_in_pool(self.name) - 1


def read_key(key_file: Path | None) -> str | None:
    """The API key in a file."""
    return key_file.read_text().strip() if key_file is not None else None


class EngineControl(Protocol):
    """One inference server, as its engine actor controls it. The defaults are those of a server started elsewhere.

    Raises, from every coroutine:
        EngineError: the server does not do it, or does not answer.
    """

    address: str  # where rollout workers reach it
    own: bool = False  # it was started here, and ends with `close`
    adapter: str = ""  # name of the last loaded adapter for requests; "": none
    adds: bool = False  # it takes directories of adapters, and adds them to its model itself

    @property
    def frozen(self) -> bool:
        """Return whether its process is stopped, as far as that can be seen from here."""
        return False

    async def start(self) -> None:
        """Start the server and return when it answers; raises EngineFailed."""

    async def ended(self) -> str:
        """Return when the server has ended, with its last output; never, if this process cannot see that."""
        await asyncio.Event().wait()
        return ""

    async def health(self) -> bool:
        """Return whether it answers and is well."""

    async def weights(self) -> tuple[str, str]:
        """Return the name of its weights, and the path that it last read; "" if it names none."""

    async def load(self) -> EngineLoad:
        """Return its load at this moment."""

    async def hold(self, *, keep: bool = False) -> None:
        """Sample nothing until `resume`; requests return with their partial tokens, unless they are kept."""

    async def drain(self) -> None:
        """Hold, and return when no request is left."""

    async def release_memory(self) -> None:
        """Give the GPU's memory back; the server is held, without requests. One without a GPU has none."""

    async def resume_memory(self) -> None:
        """Reallocate GPU memory; the caller reloads weights afterwards."""

    async def prepare(self, directory: Path) -> None:
        """Do what makes the load of these weights quick, while the server samples."""

    async def wait_gap(self) -> None:
        """Wait for a moment without a request of a client, at most `ServerSpec.gap_s`, where the server reports it."""
        return  # most servers do not

    async def load_weights(self, directory: Path, key: str) -> None:
        """Load weights, and call them `key` from here on; the server is held."""

    async def resume(self) -> None:
        """Sample again."""

    def kill(self) -> None:
        """End a server of our own that does not answer."""

    async def close(self) -> None:
        """Release the server; end one of our own."""


def open_control(home: ServerSpec) -> EngineControl:
    """The control of a server, by the kind of its group."""
    opened: Callable[[ServerSpec], EngineControl] = resolve_name(home.group.of_kind.control_of(home.group))
    return opened(home)
