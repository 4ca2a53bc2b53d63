"""Settings of the inference servers.

The comment of a field documents it: `asyncrl settings` and docs/reference/settings.md print the comment.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from asyncrl.config.setting_types import BENCHMARKS, Count, Positive, Seconds, Settings
from topics.actors import MOST_PROCESSES
from topics.engines import ANNOUNCED
from topics.roles import pool_of

FRONTS = "--tokenizer-worker-num"

GroupName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^(?!at\Z)[a-z][a-z0-9]{0,15}\Z",  # `engine-at-` begins the name of an announced server
        description="a letter, then up to 15 of a to z and 0 to 9, and not at",
    ),
]


class EngineGroup(Settings):
    """A group of inference servers with equal arguments, or with one owner."""

    # `embedded` (CPU, started here), `sglang` (started here, GPU), `external` (addresses of running servers).
    kind: Literal["embedded", "sglang", "external", "scripted"] = "embedded"
    count: Positive = 1  # Servers at start (embedded, sglang).
    # Addresses of external servers, `http://host:port`; more can be announced during the run.
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
    # CPU, started here. `auto`: servers of kind `sglang` with one GPU that is not the learner's, where 6 GiB stay free.
    staged: Literal["auto", "always", "never"] = "auto"
    # With `learner.lora.publish = "adapter"`, the form in which servers of kind `sglang` and `external` get a version:
    # `merged`: a whole model with the adapter in it; `served`: the adapter, which they add at each token.
    adapters: Literal["merged", "served"] = "merged"
    # Environment variables for a started server, such as its own PYTHONPATH.
    environment: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def servers(self) -> int:
        """Servers at start."""
        return len(self.addresses) if self.kind == "external" else self.count

    @property
    def most(self) -> int:
        """Servers that there may be: as many as there are addresses, or GPUs for."""
        if self.kind == "external":
            return len(self.addresses)
        return len(self.gpus) // max(self.gpus_each, 1) if self.gpus else MOST_PROCESSES

    def value_of(self, *options: str) -> str:
        """The last value of an option in `arguments`, as `--option value` or `--option=value`; empty: there is none."""
        words = [word for argument in self.arguments for word in argument.split("=", 1)]
        found = [value for option, value in pairwise(words) if option in options]
        return found[-1] if found else ""

    def _size(self, *options: str, otherwise: int = 1) -> int:
        text = self.value_of(*options)
        return int(text) if text.isdecimal() else otherwise

    @property
    def role(self) -> str:
        """The role of its servers, by their arguments: "prefill", "decode", or "regular" for both."""
        return self.value_of("--disaggregation-mode") or "regular"

    @property
    def bootstrap_port(self) -> int:
        """Port at which the first prefill server of the group meets decode servers; the next has the next one."""
        return self._size("--disaggregation-bootstrap-port", otherwise=8998)

    @property
    def ranks(self) -> int:
        """Processes among which one server divides its tensors."""
        return self._size("--tp-size", "--tp", "--tensor-parallel-size")

    @property
    def fronts(self) -> int:
        """Processes of one server that take requests and hand out tokens."""
        return self._size(FRONTS)

    @property
    def copies(self) -> int:
        """Further processes of one server for each of these: stages of a pipeline, and copies of the model."""
        data = () if "--enable-dp-attention" in self.arguments else ("--dp-size", "--dp", "--data-parallel-size")
        stages = self._size("--pp-size", "--pp", "--pipeline-parallel-size")
        return stages * self._size(*data)

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

    @property
    def pools(self) -> dict[str, EngineGroup]:
        """The groups by the name of their processes: `engine`, or `engine-NAME` for each of several."""
        return {f"engine-{name}": group for name, group in self.groups.items()} or {"engine": self}

    @property
    def tables(self) -> dict[str, EngineGroup]:
        """The groups by the table of the config that describes them."""
        return {f"engine.groups.{name}": group for name, group in self.groups.items()} or {"engine": self}

    @property
    def kinds(self) -> set[str]:
        """The kinds of servers that there are."""
        return {group.kind for group in self.pools.values()}

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
            return EngineGroup(kind="external")
        if group is None:
            raise ValueError(f"{engine_id!r} is of no group of engines here; there are {', '.join(self.pools)}")
        return group
