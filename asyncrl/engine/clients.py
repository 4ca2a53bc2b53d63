"""Clients that sample from engines, by the kind of their group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import TypeAlias

from asyncrl.config.engine_settings import EngineSettings
from asyncrl.engine.client import EngineClient
from asyncrl.engine.control import read_key
from asyncrl.engine.fleet import Sampler
from topics.engines import check_address

OpenClient: TypeAlias = Callable[[EngineSettings, str, Path | None], Sampler]
"""Opens a client that samples from a server, by the address that its control publishes and the file of its key.

It raises ValueError for an invalid address, and OSError if the key cannot be read.
"""


def over_http(_settings: EngineSettings, address: str, key_file: Path | None) -> Sampler:
    """A client of a server with SGLang's API."""
    check_address(address)
    return EngineClient(address, api_key=read_key(key_file))


def open_client(settings: EngineSettings, engine_id: str, address: str, key_file: Path | None) -> Sampler:
    """The client of an engine, by the kind of its group; raises as `OpenClient`."""
    opened: OpenClient = resolve_name(settings.group_of(engine_id).of_kind.client)
    return opened(settings, address, key_file)
