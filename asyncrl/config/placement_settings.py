"""Settings of the hosts and cards that the actors of a run have.

The comment at a field, beside or above it, is its documentation: `asyncrl settings` and docs/settings.md print it.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from asyncrl.config.setting_types import Settings

Amount: TypeAlias = Annotated[float, Meta(gt=0)]
PlacedRole: TypeAlias = Literal["engine", "rollout", "reward", "groupreward", "learner"]


class PlacementSettings(Settings):
    """The hosts on which the actors of the run are started, and the cards that they share."""

    kind: str = "local"  # `local`: as processes of this machine; `ray`: on the hosts of a Ray cluster.
    # Ray cluster, `host:port` of its head; empty takes `RAY_ADDRESS`, or the cluster that this machine is a node of.
    address: str = ""
    # Roles that Ray places; all others run beside `asyncrl up`. `learner` needs `shared`.
    roles: list[PlacedRole] = msgspec.field(default_factory=lambda: ["engine", "rollout", "reward", "groupreward"])
    # What a process reserves on its host, by role or group of engines: `bundles.engine = { CPU = 4, GPU = 2 }`. Without
    # one it is a CPU, and the GPUs that an `sglang` server takes by its arguments.
    bundles: dict[str, dict[str, Amount]] = msgspec.field(default_factory=dict)
    # Every host has the run's directory, the config's folder and the model under the paths that they have here. Else
    # model, login and `files` are sent to a host with the first start there.
    shared: bool = False
    # Files and folders with your functions, below the config's folder, that are sent to the hosts.
    files: list[str] = msgspec.field(default_factory=list)
    folder: str = "~/.cache/asyncrl/hosts"  # Folder on a host that holds what was sent.
    # How learner and engines use a card that both have: `none` (each has cards of its own, or they fit together by
    # themselves), `memory` (both stay on it, each with a stated part of its memory), `turns` (one at a time: the other
    # one's memory is given back meanwhile).
    share: Literal["none", "memory", "turns"] = "none"
    # With `share = "memory"`: part of a card's memory that a rank of the learner may take.
    learner_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.5
