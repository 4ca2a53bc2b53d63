"""The kinds of harnesses: `KIND` of the module of each."""

from __future__ import annotations

from importlib import import_module

from asyncrl.config.harness_settings import HarnessSettings
from asyncrl.harnesses.harness import HarnessKind


def harness_kind(settings: HarnessSettings) -> HarnessKind:
    """Return the kind of a harness."""
    name = str(settings.__struct_config__.tag).replace("-", "_")
    kind: HarnessKind = import_module(f"asyncrl.harnesses.{name}").KIND
    return kind
