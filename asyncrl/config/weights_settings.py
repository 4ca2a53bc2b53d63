"""Settings of the way of weights, and the description of the kinds of their stores.

The comment of a field documents it: `asyncrl settings` and docs/reference/settings.md print the comment.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from asyncrl.config.live_settings import CanarySettings, RewardGateSettings
from asyncrl.config.setting_types import NonNegative, Positive, Seconds, Settings

STORES = ("files", "stream")
"""The kinds of stores: the module `asyncrl.weights.NAME.kind` describes each, and has it as `KIND`."""

if TYPE_CHECKING:
    from asyncrl.weights.store import StorePlace, WeightStore

    StoreName: TypeAlias = str
else:
    StoreName = Literal[STORES]


class StoreCapability(StrEnum):
    """Something that stores of a kind can do. Core code asks for a capability, never for the name of a kind."""

    HOSTS = "hosts"  # engines read it that share no folder with the learner
    SERVER = "server"  # its versions are in the stream `WEIGHTS`, whose size they need


class StoreKind:
    """A kind of stores of weights. Configs load these descriptions, and these load no code of a store."""

    capabilities: ClassVar[frozenset[StoreCapability]] = frozenset()

    def can(self, capability: StoreCapability) -> bool:
        """Return whether stores of this kind have a capability."""
        return capability in self.capabilities

    def open(self, _place: StorePlace) -> WeightStore:
        """Open the store of a run."""
        raise NotImplementedError


@cache
def store_kind(name: str) -> StoreKind:
    """The kind of a name."""
    kind: StoreKind = import_module(f"asyncrl.weights.{name}.kind").KIND
    return kind


def stores_with(capability: StoreCapability) -> list[str]:
    """The names of the kinds that have a capability."""
    return [name for name in STORES if store_kind(name).can(capability)]


class WeightsSettings(Settings):
    """The way of weights from the learner to engines."""

    # Where versions lie: `files` (a folder that learner and engines share), `stream` (chunks on the NATS server, for
    # engines on hosts without that folder).
    store: StoreName = "files"
    # Whether versions may be differences to the previous one: `never`, `auto` (if encoding, transfer and application
    # together are faster than a full version), `always` (if they are smaller).
    delta: Literal["never", "auto", "always"] = "never"
    # What versions consist of: `model` (FP8 or INT4 as the directory of the model has them, else the weights as they
    # are trained), `plain` (those always), `fp8-blocks` (matrices in FP8, a scale for each block of 128 x 128),
    # `int4-groups` (in INT4, a scale for each 32 columns of a row; of a model with experts only these).
    format: Literal["model", "plain", "fp8-blocks", "int4-groups"] = "model"
    # Running generations when an engine takes a new version: `resume` ends them and sends them again with their tokens,
    # to be computed again; `in_place` continues them over the cache of the old weights.
    update: Literal["resume", "in_place"] = "resume"
    # Least seconds between two updates of an engine that samples for training: of the versions that come meanwhile it
    # loads the newest. Short answers are sampled again less often; their tokens are older.
    min_interval_s: NonNegative = 0.0
    # A faster transfer from the learner's memory, in addition to the store: `never`, `ipc` (engines on its GPUs, or on
    # a CPU its host, map it), `nccl` (GPU to GPU), `gloo` (between processes on the CPU). An engine for which it fails
    # reads the store.
    transport: Literal["never", "ipc", "nccl", "gloo"] = "never"
    # Seconds that one engine may take for it; a learner may wait so long before it copies the next version away.
    transport_deadline_s: Seconds = 10.0
    full_every: Positive = 16  # Versions after which one is full, for any `delta`.
    # Versions that stay in the store because they are live or were: the newest of them. `asyncrl weights rollback` goes
    # back from each to the one before.
    keep_live: Annotated[int, Meta(ge=2, le=1024)] = 3
    # Metric of evaluations, `accuracy`, `pass@k` or one of the reward's own, by which versions are promoted to the
    # channel `live`; empty promotes by command alone.
    gate_metric: str = ""
    gate_threshold: float = 1.0  # Least value of that metric that promotes.
    gate_set: str = ""  # Name of the held-out set whose evaluations are judged, where `eval.sets` names several.
    canary: CanarySettings = msgspec.field(default_factory=CanarySettings)
    reward: RewardGateSettings = msgspec.field(default_factory=RewardGateSettings)
