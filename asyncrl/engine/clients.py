"""Clients that sample from engines, by the kind of their group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asyncrl.config.engine_settings import EngineSettings
from asyncrl.engine.client import EngineClient
from asyncrl.engine.control import read_key
from asyncrl.engine.fleet import Sampler
from asyncrl.engine.scripted import ScriptedClient
from topics.engines import check_address


def _scripted(settings: EngineSettings, _address: str, _key_file: Path | None) -> Sampler:
    mean_s, sigma, tokens = settings.scripted_mean_s, settings.scripted_sigma, settings.scripted_tokens
    return ScriptedClient(mean_s=mean_s, sigma=sigma, tokens=tokens, slots=settings.max_running)


def _over_http(_settings: EngineSettings, address: str, key_file: Path | None) -> Sampler:
    check_address(address)
    return EngineClient(address, api_key=read_key(key_file))


CLIENTS: dict[str, Callable[[EngineSettings, str, Path | None], Sampler]] = {
    "embedded": _over_http,
    "sglang": _over_http,
    "external": _over_http,
    "scripted": _scripted,
}
"""Clients that sample from the servers of each kind, by the address that its control publishes.

Raise ValueError for an invalid address, and OSError if the key cannot be read.
"""
