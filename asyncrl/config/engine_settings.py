"""Settings of the inference servers, and the description of their kinds.

The comment of a field documents it: `asyncrl settings` and docs/reference/settings.md print the comment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from asyncrl.config.finding import Finding
from asyncrl.config.setting_types import BENCHMARKS, Count, Positive, Seconds, Settings, kind_name
from topics.actors import MOST_PROCESSES
from topics.engines import ANNOUNCED
from topics.roles import pool_of

_DOCUMENTED, _FURTHER = ("embedded", "sglang", "vllm", "external"), ("scripted",)
KINDS = _DOCUMENTED + _FURTHER
"""The kinds of inference servers: the module `asyncrl.engine.NAME.kind` describes each, and has it as `KIND`."""

if TYPE_CHECKING:
    KindName: TypeAlias = str
else:
    KindName = kind_name(_DOCUMENTED, _FURTHER)

GroupName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^(?!at\Z)[a-z][a-z0-9]{0,15}\Z",  # `engine-at-` begins the name of an announced server
        description="a letter, then up to 15 of a to z and 0 to 9, and not at",
    ),
]


class Capability(StrEnum):
    """Something that servers of a kind can do. Core code asks for a capability, never for the name of a kind."""

    PROCESSES = "processes"  # the run starts them here, with arguments, an API key and an environment
    ADDRESSES = "addresses"  # their owner has started them; also servers that are announced during the run
    MODEL = "model"  # they sample from the tensors of a version
    GPU = "gpu"  # they compute on GPUs
    STAGED = "staged"  # they read a version from memory into which it was copied while they sampled
    IPC = "ipc"  # they read a version from the learner's memory; so do the next two, by `weights.transport`
    NCCL = "nccl"
    GLOO = "gloo"
    SLEEP = "sleep"  # they give the memory of their GPU back, and take it again
    ADAPTERS = "adapters"  # they add an adapter to their model at each token
    SEEDS = "seeds"  # they draw the tokens of a request from its seed
    EXPERTS = "experts"  # they return the experts that each token went to
    GRAMMARS = "grammars"  # they force the form of an answer
    PROFILES = "profiles"  # they record a profile of themselves into a folder


class EngineKind:
    """A kind of inference servers: what they can do, and what their settings need.

    Configs load these descriptions: a method imports what takes long to load itself.
    """

    title: ClassVar[str] = ""  # of the servers, in messages
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    whole: ClassVar[bool] = True  # log-probs are those before top_p, top_k and min_p
    switches: ClassVar[Mapping[Capability, str]] = {}  # arguments without which servers here lack a capability
    memory_option: ClassVar[str] = ""  # argument with the part of a GPU's memory that a server takes
    size_options: ClassVar[str] = ""  # arguments with the number of GPUs of a server, as messages name them
    architectures: ClassVar[str] = ""  # package and folder with files that name the architectures of its models
    control: ClassVar[str] = ""  # module:name of its `asyncrl.engine.control.EngineControl`
    profiler: ClassVar[str] = ""  # module:name of the function that records a server, with `Capability.PROFILES`
    client: ClassVar[str] = "asyncrl.engine.clients:over_http"  # module:name of its `asyncrl.engine.clients.OpenClient`

    def capabilities_of(self, _group: EngineGroup) -> frozenset[Capability]:
        """Return what servers of a group can do: a kind may have both started servers and those of other owners."""
        return self.capabilities

    def control_of(self, _group: EngineGroup) -> str:
        """Return the module:name of the control of a group's servers."""
        return self.control

    def on_gpus(self, _group: EngineGroup) -> bool:
        """Return whether servers of a group are processes here that compute on GPUs."""
        return self.capabilities >= {Capability.PROCESSES, Capability.GPU}

    def role(self, _group: EngineGroup) -> str:
        """Return what servers compute, by their arguments: "prefill", "decode", or "regular" for both."""
        return "regular"

    def ranks(self, _group: EngineGroup) -> int:
        """Return among how many processes one server divides its tensors."""
        return 1

    def copies(self, _group: EngineGroup) -> int:
        """Return how many times `ranks` processes one server has: stages of a pipeline, and copies of the model."""
        return 1

    def checks(self, _groups: Mapping[str, EngineGroup], _update: str) -> Iterator[Finding]:
        """Find invalid settings of the groups of this kind, by their tables, for a value of `weights.update`."""
        yield from ()

    def transport_checks(self, _table: str, _group: EngineGroup, _transport: str) -> Iterator[Finding]:
        """Find settings with which servers do not take versions by `weights.transport`."""
        yield from ()

    def hints(self, _table: str, _group: EngineGroup, _model: str) -> Iterator[str]:
        """Give hints about a group; `model` is `model.path`."""
        yield from ()

    def adapter_problem(self, _group: EngineGroup, _targets: Collection[str]) -> str:
        """Return why servers cannot add adapters of these projections at each token; empty if they can."""
        return ""

    def form_problem(self, _form: str) -> str:
        """Return why servers take no second version in a quantised form; empty if they do."""
        return ""

    def key_problem(self, _key: str) -> str:
        """Return why servers cannot have an API key; empty if they can."""
        return ""

    def check_model(self, _model: Path) -> None:
        """Raise an `EngineError` if servers cannot serve the model of a directory."""

    def machine_checks(self, _table: str, _group: EngineGroup) -> Iterator[Finding]:
        """Find what this machine lacks for servers of a group."""
        yield from ()

    def memory_lines(self, _table: str, _group: EngineGroup, _engine: EngineSettings, _model: Path) -> Iterator[str]:
        """Tell how many requests the memory of a server holds; raises an `EngineError` for an unreadable model."""
        yield from ()


@cache
def kind_of(name: str) -> EngineKind:
    """The kind of a name."""
    kind: EngineKind = import_module(f"asyncrl.engine.{name}.kind").KIND
    return kind


def kinds_with(*capabilities: Capability) -> list[str]:
    """The names of the kinds that have all of some capabilities."""
    return [name for name in KINDS if kind_of(name).capabilities.issuperset(capabilities)]


class EngineGroup(Settings):
    """A group of inference servers with equal arguments, or with one owner."""

    # `embedded` (CPU, started here), `sglang` (started here, GPU), `vllm` (started here, or with addresses), `external`
    # (addresses of running servers with SGLang's API).
    kind: KindName = "embedded"
    count: Positive = 1  # Servers at start (embedded, sglang, vllm).
    # Hugging Face directory of a second model that the servers of a group have instead of the policy, with its own
    # vocabulary: for `rollout.opponent_engines`, `reward.judge_engines` or `live.judge.engines`.
    model: str = ""
    # Addresses of servers of kind `external` or `vllm`, `http://host:port`; more can be announced during the run.
    addresses: list[str] = msgspec.field(default_factory=list)
    # File with the API key of the servers; empty: started servers get their own key, external ones none.
    api_key_file: str = ""
    max_running: Positive = 256  # Requests one server runs at once.
    # Numbers of the GPUs that the servers started here share out evenly, among those that the run itself sees
    # (`CUDA_VISIBLE_DEVICES`); empty: all see all.
    gpus: list[Count] = msgspec.field(default_factory=list)
    # Further command-line arguments for a server started here, such as `["--tp-size", "2"]`.
    arguments: list[str] = msgspec.field(default_factory=list)
    # Whether a version from the store is copied into memory that the server reads (that of its GPU, by CUDA IPC) while
    # it still samples, which shortens its standstill; takes as much memory as the weights. Servers of one GPU or the
    # CPU, started here. `auto`: servers that compute on one GPU that is not the learner's, where 6 GiB stay free.
    staged: Literal["auto", "always", "never"] = "auto"
    # With `learner.lora.publish = "adapter"`, the form in which servers get a version:
    # `merged`: a whole model with the adapter in it; `served`: the adapter, which they add at each token.
    adapters: Literal["merged", "served"] = "merged"
    # Environment variables for a started server, such as its own PYTHONPATH.
    environment: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def of_kind(self) -> EngineKind:
        """The description of its kind."""
        return kind_of(self.kind)

    def can(self, *capabilities: Capability) -> bool:
        """Return whether servers of its kind have all of some capabilities."""
        return self.of_kind.capabilities_of(self).issuperset(capabilities)

    def missing_switch(self, capability: Capability) -> str:
        """Return the argument without which its servers lack a capability of their kind; empty if they have it."""
        switch = self.of_kind.switches.get(capability, "")
        return "" if switch in self.arguments else switch

    @property
    def on_gpus(self) -> bool:
        """Return whether its servers are processes here that compute on GPUs."""
        return self.of_kind.on_gpus(self)

    @property
    def servers(self) -> int:
        """Servers at start."""
        return len(self.addresses) if self.can(Capability.ADDRESSES) else self.count

    @property
    def most(self) -> int:
        """Servers that there may be: as many as there are addresses, or GPUs for."""
        if self.can(Capability.ADDRESSES):
            return len(self.addresses)
        return len(self.gpus) // max(self.gpus_each, 1) if self.gpus else MOST_PROCESSES

    def value_of(self, *options: str) -> str:
        """The last value of an option in `arguments`, as `--option value` or `--option=value`; empty: there is none."""
        words = [word for argument in self.arguments for word in argument.split("=", 1)]
        found = [value for option, value in pairwise(words) if option in options]
        return found[-1] if found else ""

    def number_of(self, *options: str, otherwise: int = 1) -> int:
        """The last value of an option in `arguments` that is a number."""
        text = self.value_of(*options)
        return int(text) if text.isdecimal() else otherwise

    @property
    def role(self) -> str:
        """The role of its servers: "prefill", "decode", or "regular" for both."""
        return self.of_kind.role(self)

    @property
    def ranks(self) -> int:
        """Processes among which one server divides its tensors."""
        return self.of_kind.ranks(self)

    @property
    def copies(self) -> int:
        """Further processes of one server for each of these: stages of a pipeline, and copies of the model."""
        return self.of_kind.copies(self)

    @property
    def gpus_needed(self) -> int:
        """GPUs that one server takes by its arguments."""
        return self.ranks * self.copies

    @property
    def gpus_each(self) -> int:
        """GPUs of one server; 0 where `gpus` names none."""
        return len(self.gpus) // self.count


class RouterSettings(Settings):
    """`sglang-router` in front of the engines."""

    # 1 for a router that is started here: it chooses the engine of each group of trajectories. 0: rollout workers do.
    count: Annotated[int, Meta(ge=0, le=1)] = 0
    # Further command-line arguments, such as `["--policy", "consistent_hashing"]`; the last of two equal options wins.
    arguments: list[str] = msgspec.field(default_factory=list)


class EngineSettings(EngineGroup):
    """Inference servers: one group of them, or several in tables `[engine.groups.NAME]`."""

    # Groups of servers by name (a to z, 0 to 9), each with its own settings, instead of the one group of this table;
    # settings of all groups stay here.
    groups: dict[GroupName, EngineGroup] = msgspec.field(default_factory=dict)
    router: RouterSettings = msgspec.field(default_factory=RouterSettings)
    # Greatest number of tokens of a request, prompt and answer together; 0 takes the model's. A generation that reaches
    # it ends with reason `length`.
    context: Count = 0
    update_deadline_s: Seconds = 120.0  # Seconds one weight update may take before the server counts as gone.
    start_deadline_s: Seconds = 300.0  # Seconds a server may take to start.
    # Mean duration of a scripted generation, lognormal with `scripted_sigma`; 0 answers at once.
    scripted_mean_s: Annotated[float, Meta(ge=0, extra=BENCHMARKS)] = 0.0
    # Sigma of the logarithm of scripted durations.
    scripted_sigma: Annotated[float, Meta(ge=0, extra=BENCHMARKS)] = 1.2
    scripted_tokens: Annotated[int, Meta(ge=1, extra=BENCHMARKS)] = 16  # Tokens of a scripted completion.
    # Seconds of a scripted decoding step: a constant, for each running request, and for each request and cached token
    # (`asyncrl.engine.scripted.rate_curve`). Lengths are then lognormal instead of durations; empty: none.
    scripted_curve: Annotated[list[float], Meta(max_length=3, extra=BENCHMARKS)] = msgspec.field(default_factory=list)
    # Seconds of a scripted update with `scripted_curve`, in which the engine samples at two thirds of its rate.
    scripted_update_s: Annotated[float, Meta(ge=0, extra=BENCHMARKS)] = 0.0

    @property
    def pools(self) -> dict[str, EngineGroup]:
        """The groups by the name of their processes: `engine`, or `engine-NAME` for each of several."""
        return {f"engine-{name}": group for name, group in self.groups.items()} or {"engine": self}

    @property
    def tables(self) -> dict[str, EngineGroup]:
        """The groups by the table of the config that describes them."""
        return {f"engine.groups.{name}": group for name, group in self.groups.items()} or {"engine": self}

    def have(self, capability: Capability) -> bool:
        """Return whether servers of all groups have a capability."""
        return all(group.can(capability) for group in self.pools.values())

    @property
    def disaggregated(self) -> bool:
        """Return whether separate servers compute prompts and tokens."""
        return any(group.role == "prefill" for group in self.pools.values())

    def group_of(self, engine_id: str) -> EngineGroup:
        """The group of `engine-2` or `engine-NAME-2`, or of a server that was announced during the run.

        Raises:
            ValueError: it is the name of no engine.
        """
        group = self.pools.get(pool_of(engine_id))
        if group is None and engine_id.startswith(ANNOUNCED):
            return EngineGroup(kind=kinds_with(Capability.ADDRESSES)[0])
        if group is None:
            raise ValueError(f"{engine_id!r} is of no group of engines here; there are {', '.join(self.pools)}")
        return group
