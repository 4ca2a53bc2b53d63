"""Settings of servers and processes: NATS, hosts and GPUs, supervision, pools that grow and shrink.

The comment of a field documents it: `asyncrl settings` and docs/reference/settings.md print the comment.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from asyncrl.config.setting_types import Count, Positive, Seconds, Settings, Share
from topics.actors import MOST_PROCESSES

PLACEMENTS = ("local", "ray")
"""The kinds of placements: the `KIND` of `asyncrl.run.placements.NAME` describes each."""

if TYPE_CHECKING:
    PlacementName: TypeAlias = str
else:
    PlacementName = Literal[PLACEMENTS]


class NatsSettings(Settings):
    """NATS: the server that holds the topics."""

    # NATS URL, `nats://host:port` or `tls://host:port`, of a cluster several with commas between; empty starts one here
    # for this run.
    url: str = ""
    # IP address of this machine that a server started here listens on; `0.0.0.0` for all. It uses no TLS.
    host: str = "127.0.0.1"
    # Port of a started server, the first of three consecutive ports for three servers; 0: a free port, kept when the
    # run resumes.
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    user: str = ""  # User name, when the URL needs one: all roles share it.
    password_file: str = ""  # File that holds the password (never the password itself).
    nkey_file: str = ""  # File that holds an nkey seed, instead of user and password.
    # Folder with a user for each role, as `asyncrl roles RUN --config FOLDER` makes it, instead of one for all.
    credentials: str = ""
    tls_ca: str = ""  # File with the certificates that sign the server's; empty for those the system trusts.
    tls_cert: str = ""  # Client certificate, where the server asks for one.
    tls_key: str = ""  # Its key.
    # How browsers reach the server (`asyncrl web`): `on` lets a started server listen for them on loopback, at a free
    # port; `off` does not; for a server at `url` its websocket URL, such as `wss://nats.example.org:8443`.
    websocket: Annotated[str, Meta(pattern=r"^(on|off|wss?://[^\s,]+)\Z")] = "on"
    # MB that each stream of tokens may hold on the server's disk; 0 sizes them by the settings and the free disk.
    stream_max_mb: Count = 0
    # How long payload streams keep tokens: `checkpoint` until no kept checkpoint needs them, `run` until the end (to
    # replay a run from its beginning; `asyncrl check` prints the room that takes).
    keep: Literal["checkpoint", "run"] = "checkpoint"
    # NATS servers that the run starts here when `url` is empty; of three, any one may die at any time.
    servers: Literal[1, 3] = 1
    # Servers that keep each stream, on a cluster given as `url`; with `servers = 3` they are three.
    replicas: Literal[1, 3, 5] = 1
    # JetStream domain that has the streams, where leaf nodes connect several; empty: that of the server at `url`.
    domain: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]*\Z")] = ""
    # Tags, such as `region:eu`, of those servers of a cluster at `url` that keep streams.
    tags: list[str] = msgspec.field(default_factory=list)
    # MB that each ledger log may hold on the server's disk; 0: the room that the server has.
    ledger_max_mb: Count = 0
    # MB that the streams of a started server may take on the disk; 0: the free space minus a small rest.
    disk_max_mb: Count = 0
    # Seconds without an acknowledgement after which an actor gives its work back and exits.
    publish_deadline_s: Seconds = 120.0

    @property
    def websocket_url(self) -> str:
        """The websocket of a server at `url`; "" without one."""
        return self.websocket if self.websocket.startswith("ws") else ""

    @property
    def copies(self) -> int:
        """Servers that keep each stream."""
        return self.replicas if self.url else self.servers


Amount: TypeAlias = Annotated[float, Meta(gt=0)]
PlacedRole: TypeAlias = Literal["engine", "rollout", "reward", "groupreward", "learner"]
LentRole: TypeAlias = Literal["engine", "rollout", "reward", "groupreward"]


class PlacementKind(NamedTuple):
    """A kind of placements. Configs load these descriptions: each text is `module:name` of what they do not load."""

    opener: str  # makes an `asyncrl.run.placement.Placement` from the config and the files of a run
    check: str = ""  # finds what processes on other hosts would lack, by a config and the folder of its paths
    node_killer: str = ""  # an `asyncrl.run.fault_injection.NodeKiller`; empty: no node can be killed
    one_machine: bool = False  # all processes are on the machine of `asyncrl up`


@cache
def placement_kind(name: str) -> PlacementKind:
    """The kind of a name."""
    kind: PlacementKind = import_module(f"asyncrl.run.placements.{name}").KIND
    return kind


class PlacementSettings(Settings):
    """The hosts on which the actors of the run are started, and the GPUs that they share."""

    kind: PlacementName = "local"  # `local`: as processes of this machine; `ray`: on the hosts of a Ray cluster.
    # Ray cluster, `host:port` of its head; empty takes `RAY_ADDRESS`, or the cluster that this machine is a node of.
    address: str = ""
    # Roles that Ray places; all others run on the machine of `asyncrl up`. `learner` needs `shared`.
    roles: list[PlacedRole] = msgspec.field(default_factory=lambda: ["engine", "rollout", "reward", "groupreward"])
    # What a process reserves on its host, by role or group of engines: `bundles.engine = { CPU = 4, GPU = 2 }`. Without
    # one it is a CPU, and the GPUs that an `sglang` server takes by its arguments.
    bundles: dict[str, dict[str, Amount]] = msgspec.field(default_factory=dict)
    # Every host has the run's directory, the config's folder and the model under the paths that they have here. Else
    # model, login and `files` are sent to a host with the first start there.
    shared: bool = False
    # Data files and folders, below the config's folder, that are sent to the hosts. Copies of your code are sent, too.
    files: list[str] = msgspec.field(default_factory=list)
    folder: str = "~/.cache/asyncrl/hosts"  # Folder on a host for received files.
    # Roles whose processes several runs share: the run starts none of them until `asyncrl share` assigns some.
    lent: list[LentRole] = msgspec.field(default_factory=list)
    # How learner and engines share a GPU: `none` (separate GPUs, or both fit without coordination), `memory` (each has
    # a stated part of its memory), `time_slice` (one at a time; the other releases its memory). Engines whose GPUs
    # (`engine.gpus`) are none of the learner's are not concerned.
    colocate: Literal["none", "memory", "time_slice"] = "none"
    # With `colocate = "memory"`: part of the memory of a GPU that a rank of the learner may take.
    learner_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.5
    # With `colocate = "memory"`: part of the memory of a GPU of the learner that a server there may take; servers with
    # a GPU to themselves take what their arguments say. 0: all do.
    engine_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.0

    @property
    def one_machine(self) -> bool:
        """Return whether all processes of the run are on the machine of `asyncrl up`."""
        return placement_kind(self.kind).one_machine

    @property
    def elsewhere(self) -> list[PlacedRole]:
        """The roles whose processes may be on other hosts."""
        return [] if self.one_machine else self.roles


class SupervisionSettings(Settings):
    """Liveness of all processes; spares and snapshots of the keepers (single writers of a log)."""

    # Seconds without a heartbeat after which a process is killed and started again, and a spare takes over. One that
    # waited for a CPU for half of that time is killed after six times as many.
    silence_s: Seconds = 10.0
    # Standby processes of prompter, buffer, learner and sessions each; one takes over when the active one falls silent.
    standbys: Annotated[int, Meta(ge=0, le=4)] = 0
    # Messages (above 512 bytes they count several times) after which a keeper stores its state on its log.
    snapshot_every: Positive = 20_000
    # Deaths of a process in a row after which it is not started again and the run stops. The engine actor of an
    # external server is always started again.
    deaths: Positive = 8
    # Longest pause before a process is started again; the first is 0.2 s, and each further one twice as long.
    restart_pause_s: Seconds = 5.0
    # MB of one file in `logs`; beyond them only its newest quarter is kept.
    log_mb: Positive = 256
    # Seconds of life in which the run made progress (a step, a trajectory's tokens, a whole reply to a user), or 15
    # times as many, after which the count of deaths restarts.
    healthy_s: Seconds = 20.0


class PoolBounds(Settings):
    """The bounds of a pool: fewest and most processes."""

    min: Positive = 1  # Fewest processes.
    max: Annotated[int, Meta(ge=1, le=MOST_PROCESSES)] = 8  # Most processes.


class AutoscaleSettings(Settings):
    """Pools of processes that grow and shrink with their load."""

    # Pools and their bounds, such as `autoscale.pools.rollout = { min = 1, max = 8 }`: rollout, reward, groupreward,
    # judge, engine or `engine-NAME`. Empty: only `asyncrl scale` changes how many processes run.
    pools: dict[str, PoolBounds] = msgspec.field(default_factory=dict)
    # Your function of the loads, `path/to/file.py:name`, which returns how many processes each pool shall have; empty
    # takes the rule of the next two settings.
    function: str = ""
    # A pool grows where more work waits, as a share of what its processes work on at once, all through the window.
    grow_waiting: Annotated[float, Meta(gt=0)] = 0.25
    # A pool shrinks where a larger share of what its processes can work on at once was idle all through the window.
    shrink_idle: Share = 0.5
    window_s: Seconds = 15.0  # Seconds for which the load must call for a change.
    cool_s: Seconds = 60.0  # Seconds after a change of a pool in which it is left alone.
    hand_s: Seconds = 600.0  # Seconds after `asyncrl scale` in which the pools that it named are left alone.
    limit_s: Seconds = 5.0  # Seconds that a call of your function may take.
