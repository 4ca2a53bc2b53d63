"""Settings of sandboxes, and the table of their kinds."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from asyncrl.config.finding import Finding
from asyncrl.config.setting_types import Count, Positive, Seconds, Settings

SANDBOXES = ("bubblewrap", "daytona", "docker", "e2b", "http", "modal", "none", "podman")
"""The kinds: `KIND` of the module `asyncrl.sandboxes.NAME` describes each."""


PATH = "/usr/local/bin:/usr/bin:/bin"
"""Folders in which programs of a sandbox are searched."""


class SandboxCapability(enum.Enum):
    """A guarantee that some sandboxes give. Core code asks for it, never for the name of a kind."""

    PRIVATE_FILES = enum.auto()  # programs see only the workspace, the system's programs, and `sandbox.readable`
    NO_NETWORK = enum.auto()  # programs reach no network
    REACHES_WORKER = enum.auto()  # programs reach what the worker serves at `Sandbox.listen`
    SHARED_MEMORY_LIMIT = enum.auto()  # `memory_mb` holds for all processes together; without it, for each process
    PROCESS_LIMIT = enum.auto()  # `processes` holds
    CORE_LIMIT = enum.auto()  # `cores` holds; without it, a program can undo it
    LINKS = enum.auto()  # programs find folders of the workspace at absolute paths too, as rows name them
    IMAGES = enum.auto()  # a sandbox has the image that a row names
    DISK_LIMIT = enum.auto()  # `disk_mb` holds for all files together; without it, for each file


class SandboxSettings(Settings):
    """Sandboxes, in which programs work on a task, and their limits."""

    # `bubblewrap`: private files and no network; it needs the program `bwrap` (Debian: `apt-get install bubblewrap`).
    # `none`: a folder of this machine, without isolation. `podman` and `docker`: a container of `image`.
    # `http`: a sandbox of the server `url` (`asyncrl sandboxes`). `e2b`, `daytona` and `modal`: those services, with
    # the keys that their SDKs find in the environment of the workers.
    kind: Literal["bubblewrap", "daytona", "docker", "e2b", "http", "modal", "none", "podman"] = "bubblewrap"
    # Image of containers, which has a Python of at least 3.9 as `python3`; template of E2B, snapshot of Daytona, image
    # of a registry for Modal.
    image: str = ""
    ttl_s: Seconds = 3600.0  # Seconds after which a service ends a sandbox, and a worker gives it no further use.
    url: str = ""  # Address of a server of sandboxes; its key is in the environment variable ASYNCRL_SANDBOX_KEY.
    trusted: bool = False  # Whether programs may do all that the user of the worker may do; `none` needs it.
    # Files and folders of the host that programs may also read, at the same absolute paths; not with `none`.
    readable: list[str] = msgspec.field(default_factory=list)
    # Absolute paths at which programs also find folders of the workspace, such as `{ "/app" = "." }`: `bubblewrap`,
    # `podman` and `docker`.
    links: dict[str, str] = msgspec.field(default_factory=dict)
    cores: Positive = 1  # CPU cores that all programs of a sandbox share.
    # Memory of all processes of a sandbox together, or of each one where the worker can make no cgroup.
    memory_mb: Annotated[int, Meta(ge=64)] = 2048
    disk_mb: Positive = 512  # Files of the workspace; `/tmp` may hold as much. `none` limits each file alone.
    processes: Annotated[int, Meta(ge=8)] = 128  # Processes and threads of a sandbox.
    output_mb: Positive = 1  # Output of one program, both streams together; a program that prints more is killed.
    wall_s: Seconds = 600.0  # Seconds after which a program is killed.
    # Trajectories that each rollout worker holds beyond its slots: their sandboxes are started and set up, or their
    # tests run, while the programs of others work in the slots.
    ready: Count = 0
    starts: Positive = 8  # Sandboxes that a worker starts at once.
    start_limit_s: Seconds = 120.0  # Seconds in which a worker asks again for a sandbox that does not start.
    # Times that a sandbox is used: for the work of one trajectory, or for its tests. Before each further use all
    # processes end and all files are removed, which takes a fraction of the time of a start. 1, and with `http` and
    # services: each use has a new one.
    uses: Positive = 1


class Launch(NamedTuple):
    """The start of the first process of a sandbox."""

    command: list[str]
    home: str  # the workspace, as programs see it
    fds: tuple[int, ...] = ()  # which the process inherits; closed here after the start
    shared_mb: int = 0  # memory that files of the workspace take
    grouped: bool = True  # whether the worker limits it by control groups
    content: str = ""  # folder inside, with the files that the workspace begins with


class SandboxKind:
    """A kind of sandboxes."""

    def checks(self, _settings: SandboxSettings) -> Iterator[Finding]:
        """Find invalid settings."""
        yield from ()

    def problem(self, _settings: SandboxSettings) -> str:
        """Return what is missing on this machine; empty if sandboxes can start."""
        return ""

    def finds(self, _program: str) -> bool:
        """Return whether sandboxes may have a program; False if it is missing for certain."""
        return True

    def capabilities(self) -> frozenset[SandboxCapability]:
        """Return the guarantees of the kind for workers on this machine."""
        raise NotImplementedError

    def prepare(self, _settings: SandboxSettings) -> str:
        """Make what sandboxes with links or with the image of a row need; returns why it cannot be made. May block."""
        return ""

    def launch(self, _settings: SandboxSettings) -> Launch:
        """Return how the process of a sandbox starts."""
        raise NotImplementedError

    def end_leftovers(self) -> list[str]:
        """End what killed workers have left outside of this machine's processes; returns the names."""
        return []


_WEAKER = {
    SandboxCapability.SHARED_MEMORY_LIMIT: (
        "sandbox.memory_mb limits each process, and not shared memory: the worker can make no control groups (cgroups)"
    ),
    SandboxCapability.PROCESS_LIMIT: (
        "sandbox.processes has no effect: the worker can make no control groups (cgroups)"
    ),
    SandboxCapability.CORE_LIMIT: "sandbox.cores is a default: programs can take more",
    SandboxCapability.DISK_LIMIT: "sandbox.disk_mb limits each file, not all of them together",
}


def weaker_limits(settings: SandboxSettings) -> list[str]:
    """Return the limits of sandboxes that hold only in part on this machine."""
    given = sandbox_kind(settings.kind).capabilities()
    return [text for capability, text in _WEAKER.items() if capability not in given]


@cache
def sandbox_kind(name: str) -> SandboxKind:
    """The kind of a name."""
    kind: SandboxKind = import_module(f"asyncrl.sandboxes.{name}").KIND
    return kind
