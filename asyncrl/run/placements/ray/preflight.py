"""Checks before a start: what the settings ask of other hosts, and whether a Ray cluster has it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from asyncrl.config.finding import Finding
from asyncrl.config.pools import lent_pools
from asyncrl.config.process_settings import NatsSettings, PlacementSettings
from asyncrl.config.settings import Config
from asyncrl.config.weights_settings import StoreCapability, store_kind, stores_with
from asyncrl.config.worker_pools import pool_sizes
from asyncrl.ports import is_ip, is_loopback
from asyncrl.process import python
from asyncrl.run.host_files import is_here, user_files
from asyncrl.run.placements.ray.cluster import Node
from asyncrl.run.placements.ray.host import installed
from asyncrl.run.placements.ray.placement import bundle_of, bundle_text, is_placed
from topics.roles import role_of

_JOIN_S = 120.0  # to join a cluster, or to find none


def check_cluster(config: Config, base: Path) -> Iterator[Finding]:
    """Find what processes on other hosts would lack."""
    found = [*_settings(config), *_files(config.placement, base)]
    yield from found or _cluster(config)


def placed_actors(config: Config) -> list[str]:
    """Return the actors of the start that Ray places."""
    counts = {pool: group.servers for pool, group in config.engine.pools.items()}
    counts |= {"rollout": config.rollout.workers, "reward": config.reward.workers, "groupreward": config.group_workers}
    counts |= pool_sizes(config)
    counts |= {"learner": 1 + config.supervision.standbys}
    counts |= dict.fromkeys(lent_pools(config), 0)
    if config.only:
        counts = {pool: count for pool, count in counts.items() if role_of(pool) in config.only}
    names = [f"{pool}-{number}" for pool, count in counts.items() for number in range(1, count + 1)]
    return [name for name in names if is_placed(config, name)]


def unfilled(config: Config, nodes: list[Node]) -> list[str]:
    """Return the actors whose bundles find no room on the nodes, the greatest bundles placed first."""
    free = [dict(node.resources) for node in nodes]
    left = []
    wanted = [(bundle_of(config, name), name) for name in placed_actors(config)]
    for bundle, name in sorted(wanted, key=lambda row: (-row[0].get("GPU", 0), -row[0].get("CPU", 0))):
        room = next((node for node in free if all(node.get(key, 0) >= amount for key, amount in bundle.items())), None)
        if room is None:
            left.append(name)
            continue
        for key, amount in bundle.items():
            room[key] -= amount
    return left


def _settings(config: Config) -> Iterator[Finding]:
    """Settings that need one machine."""
    placement = config.placement
    engines = "engine" in placement.roles
    yield from _names(config)
    if placement.shared:
        if "learner" in placement.roles and config.weights.transport != "never":
            yield Finding(("weights.transport", "placement.roles"), "needs learner and engines on one host")
    else:
        store = config.weights.store
        if engines and not store_kind(store).can(StoreCapability.HOSTS) and config.trains:
            wanted = " or ".join(f'"{name}"' for name in stores_with(StoreCapability.HOSTS))
            message = f'found "{store}", a folder that other hosts do not have; set weights.store = {wanted}'
            yield Finding(("weights.store", "placement.shared"), f"{message}, or placement.shared if they have it")
        if "learner" in placement.roles:
            message = "holds learner, whose checkpoints would lie only on its host; name a folder that all hosts have "
            yield Finding(("placement.roles", "placement.shared"), message + "as directory, and set placement.shared")
        for table, group in config.engine.tables.items():
            if group.api_key_file and "rollout" in placement.roles:
                message = "is not sent to hosts; take rollout out of placement.roles, or set placement.shared"
                yield Finding((f"{table}.api_key_file",), message)
    if config.weights.transport != "never" and engines:
        yield Finding(("weights.transport",), 'needs learner and engines on one host; set it to "never"')
    if config.engine.router.count and {"engine", "rollout"} & set(placement.roles):
        message = "listens on this machine's loopback, which other hosts do not reach; set engine.router.count to 0"
        yield Finding(("engine.router.count",), message)
    for table, group in config.engine.tables.items():
        if group.gpus and engines:
            message = "numbers GPUs of this machine; leave it out: an engine has the GPUs of its bundle"
            yield Finding((f"{table}.gpus", "placement.bundles"), message)


def _names(config: Config) -> Iterator[Finding]:
    """Find invalid addresses, and bundles of roles that are not placed on hosts."""
    placement = config.placement
    host, _, port = placement.address.rpartition(":")
    is_place = host and "/" not in host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
    if not is_place and placement.address not in ("", "auto"):
        message = (
            f'found "{placement.address}", expected HOST:PORT of the head, or nothing for the cluster of this machine'
        )
        yield Finding(("placement.address",), message)
    pools = [*config.engine.pools, *pool_sizes(config)]
    known = [*placement.roles, *(pool for pool in pools if role_of(pool) in placement.roles)]
    for name in placement.bundles:
        if name not in known:
            message = f"nothing of this name is placed on hosts; expected one of {', '.join(dict.fromkeys(known))}"
            yield Finding((f"placement.bundles.{name}", "placement.roles"), message)


def _files(placement: PlacementSettings, base: Path) -> Iterator[Finding]:
    """Find what `placement.files` cannot send."""
    if placement.shared:
        return
    try:
        sent = {path.resolve() for path in user_files(placement.files, base)}
    except FileNotFoundError as error:
        yield Finding(("placement.files",), str(error))
        return
    for path in sorted(sent):
        if not path.is_relative_to(base.resolve()):
            yield Finding(("placement.files",), f"{path} does not lie below {base}; expected paths below that folder")


def _cluster(config: Config) -> Iterator[Finding]:
    """Ask in a separate process: Ray ends processes that lose their cluster."""
    command = python("-m", "asyncrl.run.placements.ray.cluster", config.placement.address)
    try:
        done = subprocess.run(command, capture_output=True, timeout=_JOIN_S, check=False)
    except subprocess.TimeoutExpired:
        yield Finding(("placement.address",), f"the Ray cluster did not answer within {_JOIN_S:.0f} s")
        return
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        yield Finding(("placement.address",), words[-1])
        return
    nodes = msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=list[Node])
    yield from address_problems(config.nats, nodes)
    yield from install_problems(nodes)
    yield from room_problems(config, nodes)


def install_problems(nodes: list[Node]) -> Iterator[Finding]:
    """Every node runs actors as this machine does."""
    for node in nodes:
        if node.installed is None:
            message = f"did not report the installed packages: {node.silence}; see the logs of Ray, or stop Ray there"
            yield Finding(("placement.kind",), f"node {node.address} ({node.id[:12]}) {message}")
        elif node.installed != installed():
            found = f"node {node.address} ({node.id[:12]}) has {node.installed}, this machine {installed()}"
            yield Finding(("placement.kind",), f"{found}; install the same there, or stop Ray there")


def room_problems(config: Config, nodes: list[Node]) -> Iterator[Finding]:
    """The bundles of the start fit on the nodes."""
    if left := unfilled(config, nodes):
        bundles = ", ".join(f"{name} {bundle_text(bundle_of(config, name))}" for name in left)
        have = "; ".join(f"{node.address} {bundle_text(_counted(node))}" for node in nodes) or "no CPU"
        message = f"no node has room for the bundle of {bundles}, in addition to the others; the nodes have {have}"
        yield Finding(("placement.bundles",), message)


def _counted(node: Node) -> dict[str, float]:
    return {key: value for key, value in node.resources.items() if "memory" not in key}


def address_problems(nats: NatsSettings, nodes: list[Node]) -> Iterator[Finding]:
    """Other machines must reach the topics, and by TLS."""
    far = sorted({node.address for node in nodes if not node.here})
    if not far:
        return
    if not nats.url:
        message = (
            f"the server of the run would be unencrypted, or on loopback: {far[0]} is another machine; run a NATS "
            "server with TLS and name it: docs/guides/placement.md"
        )
        if not is_ip(nats.host) or is_loopback(nats.host):
            message = f"nodes on other machines, such as {far[0]}, do not reach a server on {nats.host}; " + message
        yield Finding(("nats.url", "nats.host"), message)
        return
    for url in nats.url.split(","):
        if is_here(urlsplit(url).hostname or ""):
            yield Finding(("nats.url",), f"{url} is this machine's loopback, which {far[0]} does not reach")
        elif not url.startswith("tls://"):
            message = f"{url} sends logins and tokens to {far[0]} unencrypted; expected tls://HOST:PORT"
            yield Finding(("nats.url",), message)
