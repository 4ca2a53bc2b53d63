"""A Ray cluster of simulated nodes on this machine; it removes all its processes and files."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster

from benchmarks.stage import BenchError

_MARK = "ASYNCRL_RAY_NODES"  # environment variable that every process of a cluster inherits
_STORE = 80 << 20  # bytes of a node's object store: the least that Ray takes
_TRIES = 4
_GONE_S = 30.0  # for the processes of a cluster that were killed


class Nodes:
    """A head without room for actors, and nodes that join and leave."""

    def __init__(self, folder: Path, mark: str, dashboard_port: int = 0) -> None:
        """
        Args:
            folder: for sockets and logs; the caller removes it.
            mark: distinguishes the processes of this cluster from all others.
            dashboard_port: of the server that takes jobs, which needs `ray[default]`; 0 for none.
        """
        self._mark = mark
        self._nodes: dict[str, Any] = {}  # by name
        self._started = 0
        self._given = {
            "num_cpus": 0,
            "include_dashboard": dashboard_port > 0,
            "dashboard_port": dashboard_port,
            "object_store_memory": _STORE,
            "temp_dir": str(folder),
        }
        self._cluster: Any = None
        self.address = ""

    def start(self) -> None:
        """Start the head. Ray gives its processes 30 s to answer, also on a loaded machine."""
        Path(get_default_ray_temp_dir()).mkdir(exist_ok=True)  # Ray writes an address there, and expects the folder
        for tries_left in reversed(range(_TRIES)):
            try:
                with self._marked():
                    self._cluster = Cluster(initialize_head=True, head_node_args=self._given)
                self.address = str(self._cluster.address)
                return
            except Exception:
                if not tries_left:
                    raise
                self._kill(self.found())

    def add(self, cpus: int = 2, **environment: str) -> str:
        """Add a node, with more environment variables for all its processes; return its name."""
        self._started += 1
        name = f"node-{self._started}"
        given = {"num_cpus": cpus, "object_store_memory": _STORE}
        with self._marked(**environment):
            self._nodes[name] = self._cluster.add_node(wait=False, **given)
        return name

    @contextlib.contextmanager
    def _marked(self, **environment: str) -> Iterator[None]:
        before = dict(os.environ)
        os.environ.update({_MARK: self._mark, **environment})
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    def wait(self) -> None:
        """Wait until the head knows all nodes."""
        self._cluster.wait_for_nodes(timeout=120)

    def kill(self, name: str) -> None:
        """Kill all processes of a node at once, also the actors' processes."""
        node = self._nodes.pop(name)
        for kind in ("raylet", *node.all_processes):
            for info in node.all_processes.get(kind, []):
                with contextlib.suppress(psutil.NoSuchProcess):
                    root = psutil.Process(info.process.pid)
                    for process in [root, *root.children(recursive=True)]:
                        with contextlib.suppress(psutil.NoSuchProcess):
                            process.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_head(self) -> None:
        """Kill all processes of the head."""
        for processes in self._cluster.head_node.all_processes.values():
            for info in processes:
                info.process.kill()

    def renew(self, *cpus: int) -> None:
        """End the rest of the cluster, and start a new one at another address, with one node per CPU count."""
        self._kill(self.found())
        self._nodes.clear()
        self.start()
        for count in cpus:
            self.add(count)
        self.wait()

    def swept(self) -> list[str]:
        """Clean up after nodes that others killed; return the living nodes, without the head."""
        for name, node in list(self._nodes.items()):
            if any(info.process.poll() is not None for info in node.all_processes.get("raylet", [])):
                self.kill(name)
        return list(self._nodes)

    def found(self, words: str = "") -> list[psutil.Process]:
        """Every living process of the cluster with these words in its command line."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = process.environ().get(_MARK) == self._mark and process.pid != os.getpid()
                if mine and process.status() != psutil.STATUS_ZOMBIE and words in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def close(self) -> None:
        """Kill every process of the cluster."""
        with contextlib.suppress(Exception):  # all remaining processes are killed below
            self._cluster.shutdown()
        alive = self._kill(self.found())
        if alive:
            raise BenchError(f"processes of the Ray cluster still run: {alive}")

    def _kill(self, processes: list[psutil.Process]) -> list[psutil.Process]:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        alive: list[psutil.Process] = psutil.wait_procs(processes, timeout=_GONE_S)[1]
        return alive


@contextlib.contextmanager
def ray_nodes(*cpus: int, dashboard_port: int = 0) -> Iterator[Nodes]:
    """Start a cluster with a head and a node for each number of CPUs; for the port see `Nodes`."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # socket paths may have at most 107 bytes
    nodes = Nodes(folder, secrets.token_hex(8), dashboard_port)
    try:
        nodes.start()
        for count in cpus:
            nodes.add(count)
        nodes.wait()
        yield nodes
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)
