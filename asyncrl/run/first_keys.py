"""API keys that a run makes at its start, for tenants that its config names."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from asyncrl.config.live_settings import GatewaySettings
from asyncrl.files import write_private
from asyncrl.live.keys import make_key
from asyncrl.run.directory import RunFiles


async def add_first_keys(bus: Bus, tenants: Sequence[str], files: RunFiles) -> None:
    """Add a key for each tenant without one in its file: a resumed run keeps its keys."""
    for tenant in tenants:
        path = files.keys / tenant
        if not path.exists():
            key, added = make_key(tenant)
            await publish(bus, added)
            path.parent.mkdir(exist_ok=True)
            write_private(path, key.encode())


def served_lines(gateway: GatewaySettings, files: RunFiles) -> list[str]:
    """Return what clients of a run need: the address of its gateway, and the first of the keys that it made."""
    if not gateway.count:
        return []
    address = f"http://{gateway.host}:{gateway.port}"
    lines = [f"gateway: {address}/v1 (OpenAI), {address} (Anthropic)\n"]
    for tenant in gateway.tenants[:1]:
        key = (files.keys / tenant).read_text(encoding="utf-8")
        lines.append(f"key of {tenant}: {key}\n")
    return lines
