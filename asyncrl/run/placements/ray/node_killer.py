"""Kills nodes of a Ray cluster, to test that a run survives it."""

from __future__ import annotations

import asyncio
import random

from asyncrl.run.directory import RunFiles
from asyncrl.run.placements.ray.cluster import HostFailed, HostLost, RayCluster
from asyncrl.run.placements.ray.placement import run_key

_LOST_S = 30.0  # for the head to find that a node is gone


class NodeKiller:
    """See `asyncrl.run.fault_injection.NodeKiller`."""

    def __init__(self, files: RunFiles, dice: random.Random) -> None:
        self._files = files
        self._dice = dice
        self._cluster: RayCluster | None = None

    async def kill(self) -> str:
        """Kill a node; returns its name, or "" if no node may be killed now.

        Raises:
            NoCluster: the cluster does not answer.
        """
        config = self._files.read_config()
        if self._cluster is None:
            self._cluster = await asyncio.to_thread(RayCluster, config.placement.address)
        nodes = {node.id for node in await asyncio.to_thread(self._cluster.nodes) if not node.head}
        hosts = await self._cluster.hosts(run_key(config.run, self._files))
        chosen = sorted(node for node in hosts if node in nodes)
        if len(nodes) < 2 or not chosen:
            return ""
        victim = self._dice.choice(chosen)
        try:
            await hosts[victim].call("end_node")
        except (HostLost, HostFailed):
            pass  # it is dead before it can answer
        until = asyncio.get_running_loop().time() + _LOST_S
        while asyncio.get_running_loop().time() < until:
            if victim not in {node.id for node in await asyncio.to_thread(self._cluster.nodes)}:
                break
            await asyncio.sleep(0.2)  # no event announces it
        return f"node {victim[:12]}"
