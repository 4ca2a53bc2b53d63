"""Every setting of a run: one typed tree with ranges, units and a sentence each.

The comment of a field documents it: `asyncrl settings` and docs/reference/settings.md print the comment.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncrl.config.alert_settings import ALL_SHIPPED, AlertSettings, Shipped
from asyncrl.config.engine_settings import EngineSettings
from asyncrl.config.harness_settings import AnyHarness
from asyncrl.config.learner_settings import (
    AssertionSettings,
    CriticSettings,
    FilterOptions,
    LayoutSettings,
    LoraSettings,
    ReferenceSettings,
    TeacherSettings,
    TrainerName,
)
from asyncrl.config.live_settings import GatewaySettings, LiveSettings
from asyncrl.config.pool_settings import PoolName, RolloutPoolSettings
from asyncrl.config.process_settings import AutoscaleSettings, NatsSettings, PlacementSettings, SupervisionSettings
from asyncrl.config.sandbox_settings import SandboxSettings
from asyncrl.config.setting_types import (
    BENCHMARKS,
    AdvantageName,
    AggregationName,
    ColumnName,
    Count,
    FilterName,
    LossName,
    NonNegative,
    OwnName,
    Positive,
    Rate,
    ScheduleName,
    Seconds,
    Settings,
    Share,
    StageName,
    TaskName,
)
from asyncrl.config.task_settings import EvalSettings, MixedTaskSettings, RewardSettings, StageSettings, TaskSettings
from asyncrl.config.tool_settings import AnyTools
from asyncrl.config.weights_settings import WeightsSettings
from asyncrl.sinks.kinds import AnySink


class CreateModelSettings(Settings):
    """An untrained character model, made in the run directory."""

    hidden: Positive = 64  # Width of the residual stream.
    layers: Positive = 2  # Number of transformer layers.
    heads: Positive = 2  # Attention heads.
    kv_heads: Positive = 1  # Key-value heads; divides `heads`.
    head_dim: Positive = 32  # Width of a head.
    ffn: Positive = 192  # Width of the feed-forward layer.
    context: Positive = 512  # Greatest number of tokens in a row.
    alphabet: str = "abcdefghijklmnopqrstuvwxyz0123456789+=^"  # Characters the tokenizer knows, one token each.
    template: str = ""  # Chat template (Jinja), with which it holds conversations; empty: none.


class ModelSettings(Settings):
    """The model that is trained."""

    # Hugging Face directory of a causal language model, or `smollm2-135m`, which `asyncrl up` fetches into the user's
    # cache; empty makes one from `model.create`.
    path: str = ""
    create: CreateModelSettings = msgspec.field(default_factory=CreateModelSettings)


_LEAST_PROGRESS, _MOST_PROGRESS = 64, 512  # tokens: with fewer, storing costs more than sampling again


class RolloutSettings(Settings):
    """Rollout workers and how they sample."""

    workers: Positive = 1  # Rollout worker processes at start.
    # Trajectories a worker holds at once. `auto`: as many as speed the engines up, but no more than end within the lag
    # bound: a quarter of `buffer.max_lag` batches with usual spreads of lengths (docs/internals/lag.md).
    slots: Positive | Literal["auto"] = "auto"
    group_size: Positive = 8  # Trajectories per prompt.
    # Further trajectories of each prompt. The first `group_size` that are complete are trained, and the others end as
    # `surplus`: no batch waits for the slowest. Trained groups then prefer fast trajectories.
    oversample: Annotated[int, Meta(ge=0, le=1024)] = 0
    # Further trajectories that are open when a batch takes their group: they end as `surplus` (`drop`), or they
    # continue, and a later batch within `buffer.max_lag` takes them (`keep`).
    late: Literal["drop", "keep"] = "drop"
    max_new_tokens: Positive = 256  # Greatest number of tokens sampled by one `generate`.
    temperature: NonNegative = 1.0  # Sampling temperature; log-probs are those of the distribution at this temperature.
    # Nucleus sampling: the smallest set of tokens with this probability.
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1  # Sample from the k likeliest tokens; -1 for all.
    min_p: Share = 0.0  # Drop tokens less likely than this share of the likeliest.
    stop: list[str] = msgspec.field(default_factory=list)  # Strings that end a generation.
    # Leave all special tokens (`<think>` in some models) out of the text that rewards, judges, samples and clients of
    # the gateway get. `false` leaves out only the tokens that end a turn.
    skip_special_tokens: bool = False
    # Draw each token by a seed of its trajectory and its position: the same weights sample the same tokens again under
    # any load. SGLang asks for `--enable-deterministic-inference` in `engine.arguments`.
    seeded: bool = False
    # Tokens before which a growing trajectory stores its progress: at most these are sampled twice. 0 for the smaller
    # of 512 and a quarter of `max_new_tokens`, but no fewer than 64.
    progress_tokens: Count = 0
    # Group `[engine.groups.NAME]` that answers `context.opponent`, with the first version of the run or its own model,
    # and does nothing else: a frozen opponent, or a simulated user.
    opponent_engines: str = ""
    # Seconds one call of `context.tool` may take, unless it names another limit, before it has failed.
    tool_limit_s: Seconds = 120.0
    pools: dict[PoolName, RolloutPoolSettings] = msgspec.field(default_factory=dict)

    @property
    def progress_limit(self) -> int:
        """Tokens of one trajectory that may be lost with its worker."""
        return self.progress_tokens or max(_LEAST_PROGRESS, min(_MOST_PROGRESS, self.max_new_tokens // 4))


class WorkerSettings(Settings):
    """Leases of the workers: rollout and reward."""

    lease_s: Seconds = 10.0  # Seconds after which the work of a silent worker passes on.
    # Seconds without any progress after which a worker stops renewing a lease; calls with their own limit (a tool, a
    # reward, a request) may take longer.
    stall_s: Seconds = 120.0
    # Runs without progress that ended their process, after which work ends as poison. After the first three it runs in
    # a separate process, and only deaths of that process count: killed workers never make work poison.
    poison_after: Positive = 5


class WarmupSettings(Settings):
    """Supervised steps before RL, through the same log. They end at version 0."""

    steps: Count = 0  # Number of supervised optimiser steps; 0 for none.
    # Supervised rows, as in `task.source`: conversations, or prompts with labels; empty takes those of the tasks.
    source: str = ""
    options: dict[str, Any] = msgspec.field(default_factory=dict)  # Options of that source.
    # Roles whose messages are trained in a conversation; a message with its own `"train"` true or false overrides this.
    roles: Annotated[list[str], Meta(min_length=1)] = msgspec.field(default_factory=lambda: ["assistant"])
    turns: Literal["all", "last"] = "all"  # Of these messages all are trained, or the last one alone.
    batch_rows: Positive = 256  # Rows (prompt and label, or conversation) of one supervised step.
    # Consecutive rows that travel as the segments of one supervised trajectory; divides `batch_rows`.
    rows_per_trajectory: Positive = 32
    lr: Rate = 4e-3  # Peak learning rate of the warm-up.
    lr_warmup_steps: Count = 20  # Steps over which the learning rate rises from 0.

    @property
    def batch_groups(self) -> int:
        """Trajectories of one supervised step, each of which is a group."""
        return self.batch_rows // self.rows_per_trajectory


class BufferSettings(Settings):
    """The buffer: which tokens are trained on, and how old they may be."""

    batch_groups: Positive = 64  # Groups of one optimiser step.
    # Versions between the weights that sampled a token and those it updates; no trained token exceeds it.
    max_lag: Count = 2
    # Batches packed ahead of the one in training: 0, 1, or -1 for min(1, max_lag).
    max_batches_ahead: Annotated[int, Meta(ge=-1, le=1)] = -1
    # Treatment of a trajectory with tokens beyond max_lag: they are masked, it is dropped, or it is dropped and issued
    # again as a new attempt.
    stale: Literal["mask", "drop", "reissue"] = "mask"
    # With `mask`, a trajectory with a smaller share of tokens within max_lag is dropped with reason `lag`.
    min_fresh: Share = 0.25
    # Seconds after its issue when a group is packed with the members it has (at least two), or dropped.
    group_deadline_s: Seconds = 600.0
    # Groups dropped in a row, for each that a batch takes, after which the run ends with their reasons. 0: never. Live
    # turns and groups dropped for lag do not count. Any kept group or new stage resets the count.
    max_dropped_groups: Count = 100


class LearnerSettings(Settings):
    """The optimiser and its objective."""

    # `torch`: model of transformers; `megatron`: model of megatron-core, divided as `layout` says.
    trainer: TrainerName = "torch"
    steps: Count = 100  # RL optimiser steps of the run; 0 ends it after the warm-up (supervised training alone).
    lr: Rate = 1e-6  # Peak learning rate of RL.
    lr_warmup_steps: Count = 0  # Steps over which the learning rate rises from 0.
    # Learning-rate schedule after its warm-up, over `steps`; the last step still trains.
    schedule: ScheduleName = "constant"
    betas: tuple[Share, Share] = (0.9, 0.95)  # AdamW decay rates of the two moments.
    weight_decay: NonNegative = 0.0  # AdamW weight decay.
    max_grad_norm: Rate = 1.0  # Gradient norm above which gradients are scaled down.
    loss: LossName = "decoupled"  # Loss of RL (docs/guides/algorithms.md describes each); the warm-up's is `sft`.
    loss_options: dict[str, Any] = msgspec.field(default_factory=dict)  # Options of the loss, listed below.
    # Columns that a loss of yours needs, each with your function of a row, `path/to/file.py:name`, that fills it.
    columns: dict[ColumnName, OwnName] = msgspec.field(default_factory=dict)
    # Estimator of the advantages: `grpo` is (r - mean) / std of the group (docs/guides/algorithms.md describes each).
    advantage: AdvantageName = "grpo"
    turn_discount: Share = 1.0  # With `turns`: factor of the reward of a turn for each turn before it.
    # With `gdpo`: weights of metrics that your reward returns, each a reward that is normalised alone.
    reward_weights: dict[str, float] = msgspec.field(default_factory=dict)
    # Center the advantages of all trained tokens of a batch on their mean, and divide them by their deviation.
    whiten: bool = False
    # Complete groups that are dropped and replaced (docs/guides/algorithms.md describes each filter).
    filters: list[FilterName] = msgspec.field(default_factory=list)
    filter_options: FilterOptions = msgspec.field(default_factory=FilterOptions)  # Options of the filters.
    # The unit that counts once in the loss: each trajectory, each trainable token, each group, or a constant.
    aggregation: AggregationName = "token"
    # Parameter type of the trained model. `fp8`, with `trainer = "megatron"`: bfloat16, but its layers multiply in FP8
    # by Transformer Engine. `auto`: bfloat16 on a GPU and on a CPU with AMX or AVX-512 BF16, else float32.
    dtype: Literal["float32", "bfloat16", "fp8", "auto"] = "float32"
    device: str = "cpu"  # `cpu`, `cuda` or `cuda:N`.
    # Processes that share the rows of a step, each with a part of the model and optimiser; with `cuda` one per GPU.
    ranks: Positive = 1
    # Seconds for a rank to start its process, and then to take its GPU; one that does not counts as frozen.
    start_s: Seconds = 120.0
    # Seconds for which ranks with missing GPUs are tried again; then the learner continues without them, with as many
    # as `layout` divides, and uses returned GPUs from a checkpoint on. 0 waits for all of them.
    elastic_s: Annotated[float, Meta(ge=0)] = 0.0
    # Tokens of one forward and backward pass, of each of the ranks that share a row by `layout.context`; a longer row
    # has a separate pass.
    micro_batch_tokens: Positive = 16384
    # Compute the tokens at which rows of a pass begin alike once, such as the prompt of a group or the history of a
    # session; needs `trainer = "torch"`. Models with recurrent state compute each row.
    share_prefixes: bool = False
    # Experts of a token: `own`, of the trainer's router; `replay`, those of the sampler; or `trainer`, those of the
    # trainer's pass before the update, reused in the pass with the gradient.
    routing: Literal["own", "replay", "trainer"] = "own"
    # Weight of the loss of the layer that predicts the token after the next one (MTP), with which engines draft: it
    # trains with the policy, whose gradient it does not touch, with `trainer = "megatron"`. 0: the layer is not
    # trained.
    mtp_weight: NonNegative = 0.0
    # Correction of the score of each expert per step, up if it got fewer of the tokens before trained ones than the
    # mean of its layer, down if more, with `trainer = "megatron"` and models with such biases. 0: no correction.
    router_bias_rate: NonNegative = 0.0
    # When ranks of the torch trainer exchange weights and gradients: once a `step`, holding all rounded weights and the
    # sum of its gradients; in each `micro_batch`, holding those of a layer or two; or `auto`, once a step if they fit
    # into a third of the memory of each.
    exchange: Literal["auto", "step", "micro_batch"] = "auto"
    recompute: bool = False  # Keep only the inputs of layers for the backward pass: less memory, a third more work.
    # Share of their activations that compiled layers keep for the backward pass; the cheapest ones are computed again.
    activations: Annotated[float, Meta(gt=0, le=1)] = 1.0
    # Recompute layers as with `recompute`, and keep their inputs in host memory, for rows of many tokens; needs
    # `trainer = "torch"`.
    offload_activations: bool = False
    # Type in which the head multiplies: that of the other products (`dtype`), or float32; needs `trainer = "torch"`.
    head: Literal["dtype", "float32"] = "dtype"
    moments: Literal["float32", "bfloat16"] = "float32"  # Type in which AdamW's moments are kept between updates.
    # Move weights and optimiser to host memory while no batch is there to be trained; those of policy and critic also
    # while the other one learns.
    offload_idle: bool = False
    # Compile layers, where `device` is a GPU and `dtype` not float32. The torch trainer does so before the first batch,
    # while engines start, for rows of any length.
    compile: bool = True
    publish_every: Positive = 1  # Steps between published versions.
    checkpoint_every: Positive = 20  # Steps between checkpoints.
    keep_checkpoints: Annotated[int, Meta(ge=2)] = 2  # Checkpoints kept, the newest ones.
    keep_versions: Annotated[int, Meta(ge=2)] = 4  # Published weights kept in the store, the newest ones.
    scripted_step_s: Annotated[float, Meta(ge=0, extra=BENCHMARKS)] = 0.0  # Seconds a scripted step takes.
    # Tokens of rows that a scripted step takes in a second; 0: all at once.
    scripted_tokens_per_s: Annotated[float, Meta(ge=0, extra=BENCHMARKS)] = 0.0
    reference: ReferenceSettings = msgspec.field(default_factory=ReferenceSettings)
    teacher: TeacherSettings = msgspec.field(default_factory=TeacherSettings)
    critic: CriticSettings = msgspec.field(default_factory=CriticSettings)
    layout: LayoutSettings = msgspec.field(default_factory=LayoutSettings)
    lora: LoraSettings = msgspec.field(default_factory=LoraSettings)
    assertions: AssertionSettings = msgspec.field(default_factory=AssertionSettings)

    @property
    def kept_steps(self) -> int:
        """Steps that the oldest kept checkpoint does not contain, at most."""
        return self.keep_checkpoints * self.checkpoint_every


class RecorderSettings(Settings):
    """The recorder: files for people."""

    plot: bool = True  # Draw `reward.png` at the end.
    report: bool = True  # Write `report.html` at the end: a page with the data of the run.
    # Trajectories of each batch, and answers of each evaluation (five at most), whose texts are kept in
    # `samples.jsonl`; 0 for none.
    samples: Count = 4
    # MB that `samples.jsonl` may take; when it is full, rows evenly spread over the run stay.
    samples_mb: Positive = 32


class StartSettings(Settings):
    """The start: a checkpoint that training begins with instead of an untrained model. `asyncrl fork` writes it."""

    # Checkpoint directory to begin with, weights and optimiser; empty begins with the model.
    checkpoint: str = ""
    step: Count = 0  # Step of that checkpoint: the first batch is the one after it.
    prompt: Count = 0  # Number of the first prompt that is issued, in the order of the data.
    stages: dict[str, str] = msgspec.field(default_factory=dict)  # Stages up to there, by number of their first prompt.
    # Step before the first one of the critic in it; -1: it has none, whose steps then begin with those of the run.
    critic: Annotated[int, Meta(ge=-1)] = -1
    trained: bool = False  # Whether the weights below its adapters are not those of `model`: they were trained before.


class Config(Settings):
    """A config: which actors run, how many, with what settings."""

    run: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,32}\Z")] = "run"  # Id of the run, in every topic's subject.
    # Seed of data order, model initialisation and what rollout functions draw. Each inference server draws tokens by
    # its own seed, a new one at each start; `--seed N` (sglang: `--random-seed N`) in `engine.arguments` sets it.
    seed: int = 1
    directory: str = "runs"  # Folder under which the run's directory is made.
    # Roles that run, such as `["engine"]` for a run that only serves; the recorder always runs. Empty: all.
    only: list[str] = msgspec.field(default_factory=list)
    # Files or modules with actors of your own, each with `ROLE`, `TOPICS` and `main`.
    actors: list[str] = msgspec.field(default_factory=list)
    nats: NatsSettings = msgspec.field(default_factory=NatsSettings)
    model: ModelSettings = msgspec.field(default_factory=ModelSettings)
    task: TaskSettings = msgspec.field(default_factory=TaskSettings)
    tasks: dict[TaskName, MixedTaskSettings] = msgspec.field(default_factory=dict)
    stages: dict[StageName, StageSettings] = msgspec.field(default_factory=dict)
    reward: RewardSettings = msgspec.field(default_factory=RewardSettings)
    rollout: RolloutSettings = msgspec.field(default_factory=RolloutSettings)
    # Programs that `task.rollout = "harness:NAME"` lets work on the rows. A kind's name without a table has the
    # defaults of the kind.
    harnesses: dict[TaskName, AnyHarness] = msgspec.field(default_factory=dict)
    sandbox: SandboxSettings = msgspec.field(default_factory=SandboxSettings)  # Where harnesses run programs.
    # Servers of tools for the policy. Harnesses name them in `harnesses.NAME.tools`, rollout functions in
    # `context.tools`.
    tools: dict[TaskName, AnyTools] = msgspec.field(default_factory=dict)
    workers: WorkerSettings = msgspec.field(default_factory=WorkerSettings)
    warmup: WarmupSettings = msgspec.field(default_factory=WarmupSettings)
    buffer: BufferSettings = msgspec.field(default_factory=BufferSettings)
    learner: LearnerSettings = msgspec.field(default_factory=LearnerSettings)
    weights: WeightsSettings = msgspec.field(default_factory=WeightsSettings)
    engine: EngineSettings = msgspec.field(default_factory=EngineSettings)
    gateway: GatewaySettings = msgspec.field(default_factory=GatewaySettings)
    live: LiveSettings = msgspec.field(default_factory=LiveSettings)
    eval: EvalSettings = msgspec.field(default_factory=EvalSettings)
    supervision: SupervisionSettings = msgspec.field(default_factory=SupervisionSettings)
    autoscale: AutoscaleSettings = msgspec.field(default_factory=AutoscaleSettings)
    placement: PlacementSettings = msgspec.field(default_factory=PlacementSettings)
    recorder: RecorderSettings = msgspec.field(default_factory=RecorderSettings)
    # Tools to which the recorder also writes its rows, each from its stored position.
    metrics: list[AnySink] = msgspec.field(default_factory=list)
    alert: list[AlertSettings] = msgspec.field(default_factory=list)
    # Alerts that notify without a table of yours: collapses of entropy, effective sample share (`ess`) and response
    # length, groups without spread of rewards, wasted tokens, and stalls. An empty list switches them off.
    shipped_alerts: list[Shipped] = msgspec.field(default_factory=lambda: [*ALL_SHIPPED])
    start: StartSettings = msgspec.field(default_factory=StartSettings)

    @property
    def trains(self) -> bool:
        """True if a learner runs; without one, engines serve the original model."""
        return not self.only or "learner" in self.only

    @property
    def rolls_out(self) -> bool:
        """True where rollout workers run; without one, `rollout` and the data have no use."""
        return not self.only or "rollout" in self.only

    @property
    def origin(self) -> int:
        """Step of the weights before the first batch; below 0 before a warm-up."""
        return self.start.step - self.warmup.steps

    @property
    def critic_origin(self) -> int:
        """Step before the first one of the critic, if there is a critic."""
        return self.start.critic if self.start.critic >= 0 else self.start.step

    @property
    def group_workers(self) -> int:
        """Processes that grade whole groups; none if no reward needs them."""
        tasks, sets = self.tasks.values(), self.eval.sets.values()
        scopes = {self.reward.scope, *(own.reward_scope for own in tasks), *(own.reward_scope for own in sets)}
        return self.reward.workers if "group" in scopes else 0

    @property
    def judges(self) -> int:
        """Processes that judge turns; none without a gateway."""
        return self.live.judge.workers if self.gateway.count and self.live.judge.kind else 0

    @property
    def session_keepers(self) -> int:
        """Keepers of sessions with standbys; none without a gateway."""
        return 1 + self.supervision.standbys if self.gateway.count else 0

    @property
    def ahead(self) -> int:
        """Batches packed ahead of the one in training; without a learner all."""
        if not self.trains:
            return self.learner.steps
        return min(1, self.buffer.max_lag) if self.buffer.max_batches_ahead < 0 else self.buffer.max_batches_ahead
