"""The memory that keys and values may take, counted in tokens; without torch, so that checks can tell it."""

from __future__ import annotations

from pathlib import Path

import psutil

from asyncrl.config.engine_settings import EngineGroup, EngineSettings
from asyncrl.engine.embedded.config import ModelConfig

BLOCK = 16
"""Tokens by which memory is counted, and by which prefixes are shared."""

SHARE = 0.25
"""Part of the free memory that keys and values may take by default; the rest is for the learner and others."""

_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes that processes can still have on this host or, where the container has a limit, in the container."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no container, or no limit
        return free
    cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    return min(free, max(0, limit - used + cached))


def memory_share(settings: EngineSettings, group: EngineGroup) -> float:
    """Part of the free memory that a server of a group may fill: servers of one host start at the same time."""
    servers = sum(one.count for one in settings.pools.values() if one.kind == group.kind)
    return float(group.value_of("--mem-fraction-static") or SHARE / max(servers, 1))


def token_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of the keys and values of one token.

    Args:
        itemsize: bytes of a number.
    """
    return 2 * config.layers * config.kv_heads * config.head_dim * itemsize


def token_budget(config: ModelConfig, itemsize: int, share: float) -> int:
    """Tokens whose keys and values fit into a share of the free memory: whole blocks, and one at least."""
    return max(BLOCK, int(share * free_memory()) // token_bytes(config, itemsize) // BLOCK * BLOCK)


def in_blocks(tokens: int) -> int:
    """Tokens, rounded up to whole blocks."""
    return -(-tokens // BLOCK) * BLOCK
