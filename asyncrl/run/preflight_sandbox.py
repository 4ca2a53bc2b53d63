"""Checks of the sandboxes of a config on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.finding import Finding
from asyncrl.config.sandbox_settings import sandbox_kind, weaker_limits
from asyncrl.config.setting_types import changed_keys
from asyncrl.config.settings import Config


def uses_sandboxes_here(config: Config) -> bool:
    """Return whether workers on this machine start sandboxes."""
    return bool(changed_keys(config.sandbox)) and config.placement.one_machine


def check_sandbox(config: Config, _base: Path) -> Iterator[Finding]:
    """Find what sandboxes lack here. Workers on other hosts find it when they start a sandbox."""
    if uses_sandboxes_here(config) and (problem := sandbox_kind(config.sandbox.kind).problem(config.sandbox)):
        yield Finding(("sandbox.kind",), problem)


def sandbox_hints(config: Config) -> list[str]:
    """Return the limits that hold only in part."""
    return weaker_limits(config.sandbox) if uses_sandboxes_here(config) else []
