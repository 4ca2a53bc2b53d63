"""A Ray cluster: its nodes, and hosts in bundles of placement groups. This file alone imports ray.

`python -m asyncrl.run.placements.ray.cluster ADDRESS` prints the nodes as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.errors import AsyncRLError
from asyncrl.run.placements.ray.host import Host, Installed

_OPEN_S = 5.0  # for the head to take a connection
_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # the first frame of both sides of HTTP/2, which gRPC is
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS
_ASK_S = 60.0  # for nodes to start a worker and answer
_ABSENT = "No module named 'asyncrl'"
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # where Ray passes its settings to a submitted job's programs
_SLICE_S = 1.0  # of a wait in a thread, which the end of the program waits for


class NoCluster(AsyncRLError):
    """There is no Ray here, no cluster, or one that this program cannot join."""

    fatal = True


class HostLost(AsyncRLError):
    """The host of a process does not answer. It may live: what its processes store is fenced as ever."""


class HostFailed(AsyncRLError):
    """A host could not carry out a request."""


class Node(msgspec.Struct, frozen=True):
    """A living node of the cluster."""

    id: str
    address: str  # IP
    resources: dict[str, float]  # total resources, reserved ones included
    head: bool
    here: bool  # it is this machine
    installed: Installed | None = None  # if it was queried
    silence: str = ""  # why it did not answer


class RemoteHost(Host):
    """A host in a bundle, as a Ray actor."""

    def __init__(self, folder: str, run: str, actor_id: str) -> None:
        import ray

        node = str(ray.get_runtime_context().get_node_id())
        super().__init__(folder, run, node[:12], actor_id, ray.util.get_node_ip_address())
        self._node = node

    async def node(self) -> str:
        """Return the id of its node."""
        return self._node


class Seat:
    """A bundle that is reserved, with the host in it."""

    def __init__(self, group: Any, actor: Any) -> None:
        self._group = group  # None where another process reserved it
        self._actor = actor

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the host.

        Raises:
            HostLost: it does not answer.
            HostFailed: it raised.
        """
        from ray.exceptions import RayError, RayTaskError

        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayTaskError as error:
            raise HostFailed(f"{type(error.cause).__name__}: {error.cause}") from error
        except RayError as error:
            if _ABSENT in str(error):
                raise HostFailed("its host has no asyncrl; install there what this machine has") from error
            raise HostLost(_last_line(error).partition(". ")[0]) from error  # advice about Ray follows

    def send(self, method: str, *arguments: Any) -> None:
        """Call a method without waiting for it."""
        getattr(self._actor, method).remote(*arguments)

    def release(self) -> None:
        """End the host and its processes, and return the bundle; blocks."""
        import ray
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):  # of a restarted cluster: they ended with the old one
            ray.kill(self._actor)
            ray.util.remove_placement_group(self._group)


class RayCluster:
    """The connection of this process to a cluster; one per process. Its reservations end with the process."""

    def __init__(self, address: str) -> None:
        """Join; blocks.

        Args:
            address: `host:port`, or "" for `RAY_ADDRESS` or the cluster that this machine is a node of.

        Raises:
            NoCluster: with what to do.
        """
        where = address or os.environ.get("RAY_ADDRESS", "") or "auto"
        try:
            import ray
        except ImportError as error:
            raise NoCluster(
                f'placement.kind = "ray": ray is not installed for {sys.executable} ({error}); '
                "pip install 'asyncrl[ray]'"
            ) from error
        name = "of this machine" if where == "auto" else f"at {where}"
        try:
            _check_open(where)
            _leave_working_dir()
            ray._private.worker._worker_logs_enabled = False  # else it prints what nodes do to stdout, which is ours
            ray.init(where, logging_level=logging.ERROR, log_to_driver=False)
        except OSError as error:  # ConnectionError is one
            raise NoCluster(
                f"no Ray cluster {name} answers: {_first_line(error).rstrip('.')}; start it with `ray start --head`, "
                "and further nodes with `ray start --address HEAD:PORT`, or name another with placement.address"
            ) from error
        except RuntimeError as error:  # also of another version of Python or Ray
            raise NoCluster(f"the Ray cluster {name} cannot be joined: {' '.join(str(error).split())}") from error
        self.here = str(ray.util.get_node_ip_address())
        self.head = str(ray.get_runtime_context().gcs_address)

    def nodes(self) -> list[Node]:
        """Return the living nodes."""
        import ray

        return [
            Node(
                node["NodeID"],
                node["NodeManagerAddress"],
                {key: value for key, value in node["Resources"].items() if not key.startswith("node:")},
                head="node:__internal_head__" in node["Resources"],
                here=node["NodeManagerAddress"] == self.here,
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def asked(self, nodes: list[Node], within_s: float) -> list[Node]:
        """Return the nodes with their installed versions, empty for nodes that did not answer in time; blocks."""
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

        ask = ray.remote(_found)
        where = [OnNode(node.id, soft=False) for node in nodes]
        asked = [ask.options(num_cpus=0, scheduling_strategy=one).remote() for one in where]
        done = set(ray.wait(asked, num_returns=len(asked), timeout=within_s)[0]) if asked else set()
        found = []
        for node, ref in zip(nodes, asked, strict=True):
            answer, silence = None, f"no answer within {within_s:g} s"
            if ref in done:
                try:
                    answer, silence = Installed(*ray.get(ref)), ""
                except RayError as error:  # it left, or cannot start a worker
                    silence = _last_line(error)
            found.append(msgspec.structs.replace(node, installed=answer, silence=silence))
        return found

    async def answers(self) -> bool:
        """Return whether the head takes connections. A call of Ray would wait for it until Ray ends this process."""
        host, _, port = self.head.rpartition(":")
        try:
            async with asyncio.timeout(_OPEN_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    async def hosts(self, run: str) -> dict[str, Seat]:
        """Return a host of a run on each node that has one, by the id of the node."""
        import ray

        rows = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        found = {}
        for name in sorted(row["name"] for row in rows if row["namespace"] == run):
            try:
                seat = Seat(None, await asyncio.to_thread(ray.get_actor, name, run))
                async with asyncio.timeout(_OPEN_S):
                    found[await seat.call("node")] = seat
            except (ValueError, HostLost, TimeoutError):
                continue  # it has just ended
        return found

    async def reserve(
        self, folder: str, run: str, actor_id: str, bundle: Mapping[str, float], within_s: float
    ) -> Seat | None:
        """Reserve a bundle, and start the host of an actor in it; None if no node had room in time.

        Args:
            folder: on the host.
            run: names the run among all.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as InGroup

        make = ray.util.placement_group
        group = await asyncio.to_thread(make, [dict(bundle)], strategy="STRICT_PACK", name=f"{run}/{actor_id}")
        try:
            slices = max(1, round(within_s / _SLICE_S))
            while not await asyncio.to_thread(group.wait, _SLICE_S):
                if not (slices := slices - 1):
                    await asyncio.to_thread(ray.util.remove_placement_group, group)
                    return None
        except asyncio.CancelledError:
            ray.util.remove_placement_group(group)
            raise
        rest = {key: value for key, value in bundle.items() if key not in ("CPU", "GPU")}
        options = {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "resources": rest,
            "name": f"{actor_id}-{secrets.token_hex(4)}",
            "namespace": run,
            "scheduling_strategy": InGroup(placement_group=group, placement_group_bundle_index=0),
        }
        return Seat(group, ray.remote(RemoteHost).options(**options).remote(folder, run, actor_id))


def _found() -> tuple[str, str]:
    """Return the versions of Python and asyncrl; it runs on nodes that may have no asyncrl."""
    import importlib.metadata
    import platform

    try:
        importlib.import_module("asyncrl")
        return platform.python_version(), importlib.metadata.version("asyncrl")
    except ImportError:  # PackageNotFoundError is one
        return platform.python_version(), ""


def _check_open(where: str) -> None:
    """Raise OSError if no server, or no server of Ray, listens: Ray itself would wait longer."""
    host, _, port = where.rpartition(":")
    if not (host and port.isdecimal()):
        return
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_OPEN_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
            return
        connection.sendall(_PREFACE)
        answer = b""
        with contextlib.suppress(TimeoutError):
            answer = connection.recv(len(_SETTINGS))
    if answer[3:4] != _SETTINGS[3:4]:  # the kind of a frame
        raise ConnectionError(f"what listens there {'is no server of Ray' if answer else 'does not answer'}")


def _leave_working_dir() -> None:
    """Forget the working folder of the submitted job of this program: hosts are sent their files.

    Each node that gets its name fetches it afresh, a second one of this machine over the one that `asyncrl up` is in.
    """
    if job := os.environ.get(_JOB):
        settings = json.loads(job)
        settings.get("runtime_env", {}).pop("working_dir", None)
        os.environ[_JOB] = json.dumps(settings)


def _last_line(error: BaseException) -> str:
    words = str(error).strip().splitlines() or [type(error).__name__]
    return f"{type(error).__name__}: {words[-1].strip()}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def main() -> None:
    """Print the nodes of the cluster, or why there are none."""
    try:
        cluster = RayCluster(sys.argv[1] if len(sys.argv) > 1 else "")
    except NoCluster as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from error
    hosts = [node for node in cluster.nodes() if {"CPU", "GPU"} & node.resources.keys()]  # others take no actor
    nodes = cluster.asked(hosts, _ASK_S)
    print(msgspec.json.encode(nodes).decode())


if __name__ == "__main__":
    main()
