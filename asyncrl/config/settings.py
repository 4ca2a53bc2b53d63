"""Every setting of a run: one typed tree with ranges, units and a sentence each.

The comment at a field, beside or above it, is its documentation: `asyncrl settings` and docs/settings.md print it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from asyncrl.config.algorithm_names import AdvantageName, AggregationName, FilterName, LossName, ScheduleName
from asyncrl.config.engine_settings import EngineSettings
from asyncrl.config.setting_types import BENCHMARKS, Count, NonNegative, Positive, Rate, Seconds, Settings, Share

TaskName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^(?!(task|warmup)\Z)[a-z][a-z0-9_-]{0,31}\Z",  # topics.prompts gives these two a meaning
        description="a letter, then up to 31 of a to z, 0 to 9, _ and -, and not task or warmup",
    ),
]


class NatsSettings(Settings):
    """NATS: the server that holds the topics."""

    # NATS URL, `nats://host:port` or `tls://host:port`, of a cluster several with commas between; empty starts one here
    # for this run.
    url: str = ""
    # IP address of this machine that a server started here listens on; `0.0.0.0` for all. It uses no TLS.
    host: str = "127.0.0.1"
    # Port of a server started here, of three the first of three in a row; 0: a free one, kept when the run goes on.
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    user: str = ""  # User name, when the URL needs one: all roles share it.
    password_file: str = ""  # File that holds the password (never the password itself).
    nkey_file: str = ""  # File that holds an nkey seed, instead of user and password.
    # Folder with a user for each role, as `asyncrl roles RUN --config FOLDER` makes it, instead of one for all.
    credentials: str = ""
    tls_ca: str = ""  # File with the certificates that sign the server's; empty for those the system trusts.
    tls_cert: str = ""  # Client certificate, where the server asks for one.
    tls_key: str = ""  # Its key.
    # MB that each payload stream may hold on the server's disk; 0 sizes them by the settings and the free disk.
    stream_max_mb: Count = 0
    # How long payload streams keep tokens: `checkpoint` until no kept checkpoint needs them, `run` until the end (to
    # replay a run from its beginning; `asyncrl check` prints the room that takes).
    keep: Literal["checkpoint", "run"] = "checkpoint"
    # NATS servers that the run starts here when `url` is empty; of three, any one may die at any time.
    servers: Literal[1, 3] = 1
    # Servers that keep each stream, on a cluster given as `url`; with `servers = 3` they are three.
    replicas: Literal[1, 3, 5] = 1
    # MB that each ledger log may hold on the server's disk; 0 sizes them by the settings and the free disk.
    ledger_max_mb: Count = 0
    # MB that the streams of a server started here may take on the disk; 0: what is free, but for a small rest.
    disk_max_mb: Count = 0
    # Seconds without an acknowledgement after which an actor gives its work back and exits.
    publish_deadline_s: Seconds = 120.0

    @property
    def copies(self) -> int:
        """Servers that keep each stream."""
        return self.replicas if self.url else self.servers


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


class ModelSettings(Settings):
    """The model that is trained."""

    path: str = ""  # Hugging Face model directory (Qwen3, Qwen2.5 or Llama); empty makes one from `model.create`.
    create: CreateModelSettings = msgspec.field(default_factory=CreateModelSettings)


class TaskSettings(Settings):
    """The task: prompts and the rollout function."""

    # `reverse`, `sum`, `reasoning-gym:NAME`, or a file: `rows.jsonl`, `rows.parquet`, `rows.jsonl@[0:100]`.
    source: str = "reverse"
    # Options of the source, such as `letters = 8` or `prompt_key = "question"`.
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    # Times each row of a file is issued as a prompt of RL, in a new order each time; 0: as often as is needed.
    epochs: Annotated[int, Meta(ge=0)] = 0
    # Seconds that making one row may take; a row that takes longer ends the run with an error.
    row_limit_s: Seconds = 300.0
    # Rollout function: `single_turn`, `path/to/file.py:function` or `package.module:function`.
    rollout: str = "single_turn"


class MixedTaskSettings(Settings):
    """One of several tasks, whose prompts are issued in turn by their shares. What is left out is as for one task."""

    source: str | None = None  # As `task.source`.
    options: dict[str, Any] | None = None  # As `task.options`.
    share: Annotated[int, Meta(ge=1, le=1000)] = 1  # Prompts of it among as many as all shares add up to.
    rollout: str | None = None  # As `task.rollout`.
    reward: str | None = None  # As `reward.function`.
    group_size: Positive | None = None  # As `rollout.group_size`.
    temperature: NonNegative | None = None  # As `rollout.temperature`.
    advantage: AdvantageName | None = None  # As `learner.advantage`.
    eval_source: str | None = None  # As `eval.source`; empty takes its `source` with another seed.


class RewardSettings(Settings):
    """The reward: how a finished trajectory is graded."""

    # `exact`, `math`, `reasoning-gym`, an `http://` address, `path/file.py:function` or `package.module:function`;
    # empty where the rollout function gives every reward (`context.outcome`).
    function: str = "exact"
    workers: Positive = 1  # Reward worker processes at start.
    children: Positive = 1  # Child processes a worker runs user functions in.
    # Seconds one call may take before its child process is killed and the trajectory fails.
    time_limit_s: Seconds = 30.0
    # MB that each process of a user function may write to (data, not files or libraries it maps); beyond them the
    # trajectory fails. 0 for no limit.
    memory_mb: Count = 4096
    in_flight: Positive = 256  # Trajectories a reward worker holds at once.


_LEAST_PROGRESS, _MOST_PROGRESS = 64, 512  # tokens: with fewer, storing costs more than sampling again


class RolloutSettings(Settings):
    """Rollout workers and how they sample."""

    workers: Positive = 1  # Rollout worker processes at start.
    slots: Positive = 256  # Trajectories a worker holds at once.
    group_size: Positive = 8  # Trajectories per prompt.
    max_new_tokens: Positive = 256  # Greatest number of tokens sampled by one `generate`.
    temperature: NonNegative = 1.0  # Sampling temperature; log-probs are those of the distribution at this temperature.
    # Nucleus sampling: the smallest set of tokens with this probability.
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1  # Sample from the k likeliest tokens; -1 for all.
    min_p: Share = 0.0  # Drop tokens less likely than this share of the likeliest.
    stop: list[str] = msgspec.field(default_factory=list)  # Strings that end a generation.
    # Tokens before which a growing trajectory stores its progress: at most these are sampled twice. 0 for the smaller
    # of 512 and a quarter of `max_new_tokens`, but no fewer than 64.
    progress_tokens: Count = 0
    # Seconds one call of `context.tool` may take, unless it names another limit, before it has failed.
    tool_limit_s: Seconds = 120.0

    @property
    def progress_limit(self) -> int:
        """Tokens of one trajectory that may be lost with its worker."""
        return self.progress_tokens or max(_LEAST_PROGRESS, min(_MOST_PROGRESS, self.max_new_tokens // 4))


class WorkerSettings(Settings):
    """Leases of the workers: rollout and reward."""

    lease_s: Seconds = 10.0  # Seconds after which the work of a silent worker passes on.
    # Seconds without any progress after which a worker stops renewing a lease; what has a limit of its own (a tool, a
    # reward, a request) may take longer.
    stall_s: Seconds = 120.0
    # Runs without progress that ended their process, after which work ends as poison. After the first three it is done
    # in a process of its own, and only what ends that one counts: workers that are killed make nothing poison.
    poison_after: Positive = 5


class WarmupSettings(Settings):
    """Supervised steps on the task's labels before RL, through the same log. They end at version 0."""

    steps: Count = 0  # Number of supervised optimiser steps; 0 for none.
    batch_rows: Positive = 256  # Rows (prompt and label) of one supervised step.
    # Consecutive rows that travel as the segments of one supervised trajectory; divides `batch_rows`.
    rows_per_trajectory: Positive = 32
    lr: Rate = 4e-3  # Peak learning rate of the warm-up.
    lr_warmup_steps: Count = 20  # Steps over which the learning rate rises from 0.


class BufferSettings(Settings):
    """The buffer: which tokens are trained on, and how old they may be."""

    batch_groups: Positive = 64  # Groups of one optimiser step.
    # Versions between the weights that sampled a token and those it updates; no trained token exceeds it.
    max_lag: Count = 2
    # Batches packed ahead of the one in training: 0, 1, or -1 for min(1, max_lag).
    ahead: Annotated[int, Meta(ge=-1, le=1)] = -1
    # Treatment of a trajectory with tokens beyond max_lag: they are masked, it is dropped, or it is dropped and issued
    # again as a new attempt.
    stale: Literal["mask", "drop", "reissue"] = "mask"
    # With `mask`, a trajectory with a smaller share of tokens within max_lag is dropped with reason `lag`.
    min_fresh: Share = 0.25
    # Seconds after its issue when a group is packed with the members it has (at least two), or dropped.
    group_deadline_s: Seconds = 600.0


class LearnerSettings(Settings):
    """The optimiser and its objective."""

    trainer: Literal["torch", "scripted"] = "torch"  # `torch`: transformers model.
    steps: Count = 100  # RL optimiser steps of the run; 0 ends it after the warm-up (supervised training alone).
    lr: Rate = 1e-6  # Peak learning rate of RL.
    lr_warmup_steps: Count = 0  # Steps over which the learning rate rises from 0.
    # Learning-rate schedule after its warm-up, over `steps`; the last step still trains.
    schedule: ScheduleName = "constant"
    betas: tuple[Share, Share] = (0.9, 0.95)  # AdamW decay rates of the two moments.
    weight_decay: NonNegative = 0.0  # AdamW weight decay.
    max_grad_norm: Rate = 1.0  # Gradient norm above which gradients are scaled down.
    loss: LossName = "decoupled"  # Loss of RL (docs/algorithms.md describes each); the warm-up's is `sft`.
    loss_options: dict[str, Any] = msgspec.field(default_factory=dict)  # Options of the loss, listed below.
    # Estimator of the advantages: `grpo` is (r - mean) / std of the group (docs/algorithms.md describes each).
    advantage: AdvantageName = "grpo"
    # Complete groups that are dropped and replaced: `zero_variance`, those whose rewards are all equal.
    filters: list[FilterName] = msgspec.field(default_factory=list)
    # The unit that counts once in the loss: each trajectory, each trainable token, each group, or a constant.
    aggregation: AggregationName = "token"
    dtype: Literal["float32", "bfloat16"] = "float32"  # Parameter type of the trained model.
    device: str = "cpu"  # `cpu`, `cuda` or `cuda:N`.
    # Processes that share the rows of a step, each with a part of the model and optimiser; with `cuda` one per GPU.
    ranks: Positive = 1
    micro_batch_tokens: Positive = 16384  # Padded tokens of one forward and backward pass.
    publish_every: Positive = 1  # Steps between published versions.
    checkpoint_every: Positive = 20  # Steps between checkpoints.
    keep_checkpoints: Annotated[int, Meta(ge=2)] = 2  # Checkpoints kept, the newest ones.
    keep_versions: Annotated[int, Meta(ge=2)] = 4  # Published weights kept in the store, the newest ones.
    scripted_step_s: Annotated[float, Meta(ge=0, extra=BENCHMARKS)] = 0.0  # Seconds a scripted step takes.

    @property
    def kept_steps(self) -> int:
        """Steps that the oldest kept checkpoint does not contain, at most."""
        return self.keep_checkpoints * self.checkpoint_every


class EvalSettings(Settings):
    """Evaluation on held-out prompts, by the task's rollout function and reward."""

    prompts: Annotated[int, Meta(ge=0, le=65536)] = 0  # Prompts of one evaluation; 0 for no evaluation.
    # Seconds after its issue when an evaluation is scored with the grades it has: what is open counts as reward 0.
    deadline_s: Seconds = 600.0
    every: Count = 0  # RL steps between evaluations; 0 evaluates version 0 and the last one only.
    source: str = ""  # Held-out source as in `task.source`; empty takes the task's with another seed.
    temperature: NonNegative = 0.0  # Sampling temperature; 0 is greedy.


class WeightsSettings(Settings):
    """The way of weights from the learner to engines."""

    # Where versions lie: `files` (a folder that learner and engines share), `stream` (chunks on the NATS server, for
    # engines on hosts without that folder).
    store: Literal["files", "stream"] = "files"
    # Whether versions may be differences to the one before: `never`, `auto` (where their encoding, way and application
    # together took less time than those of a full version), `always` (where they are smaller).
    delta: Literal["never", "auto", "always"] = "never"
    # Generations under way when an engine takes a new version: `resume` ends them and sends them again, with the tokens
    # that came, to be computed anew; `in_place` lets them go on over the cache that the old weights filled.
    update: Literal["resume", "in_place"] = "resume"
    full_every: Positive = 16  # Versions after which one is full, whatever `delta` is.
    # Versions that stay in the store because they are live or were: the newest of them. `asyncrl weights rollback` goes
    # back from each to the one before.
    keep_live: Annotated[int, Meta(ge=2, le=1024)] = 3
    # Metric of evaluations, `accuracy` or one of the reward's own, by which versions are promoted to the channel
    # `live`; empty promotes by command alone.
    gate_metric: str = ""
    gate_threshold: float = 1.0  # Least value of that metric that promotes.


class SupervisionSettings(Settings):
    """Liveness of all processes; spares and snapshots of the keepers (prompter, buffer, learner, supervisor)."""

    # Seconds without a heartbeat after which a process is killed and started again, and a spare takes over.
    silence_s: Seconds = 10.0
    # Standby processes of prompter, buffer and learner each; one takes over when the active one falls silent.
    spares: Annotated[int, Meta(ge=0, le=4)] = 0
    # Messages (those above 512 bytes count several times) after which a keeper puts what it knows on its log.
    snapshot_every: Positive = 20_000
    # Deaths of a process in a row after which it is not started again and the run stops. The engine actor of an
    # external server is always started again.
    deaths: Positive = 8
    # Longest pause before a process is started again; the first is 0.2 s, and each further one twice as long.
    restart_pause_s: Seconds = 5.0
    # Seconds of life in which something was achieved, or 15 times as many, after which its deaths count anew.
    healthy_s: Seconds = 20.0


class PlacementSettings(Settings):
    """The hosts on which the actors of the run are started."""

    kind: str = "local"  # `local`: as processes of this machine.


class RecorderSettings(Settings):
    """The recorder: files for people."""

    plot: bool = True  # Draw `reward.png` at the end.
    # Trajectories of each batch, and answers of each evaluation (five at most), whose texts are kept in
    # `samples.jsonl`; 0 for none.
    samples: Count = 4
    # MB that `samples.jsonl` may take; when it is full, rows evenly spread over the run stay.
    samples_mb: Positive = 32


class StartSettings(Settings):
    """The start: a checkpoint that training begins with instead of an untrained model. `asyncrl fork` writes it."""

    # Checkpoint directory to begin with, weights and optimiser; empty begins with the model as it is.
    checkpoint: str = ""
    step: Count = 0  # Step of that checkpoint: the first batch is the one after it.
    prompt: Count = 0  # Number of the first prompt that is issued, in the order of the data.


class Config(Settings):
    """A config: which actors run, how many, with what settings."""

    run: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,32}\Z")] = "run"  # Id of the run, in every topic's subject.
    # Seed of data order, model initialisation and what rollout functions draw. Each inference server draws tokens by a
    # seed of its own, a new one at each start; `--seed N` (sglang: `--random-seed N`) in `engine.arguments` sets it.
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
    reward: RewardSettings = msgspec.field(default_factory=RewardSettings)
    rollout: RolloutSettings = msgspec.field(default_factory=RolloutSettings)
    workers: WorkerSettings = msgspec.field(default_factory=WorkerSettings)
    warmup: WarmupSettings = msgspec.field(default_factory=WarmupSettings)
    buffer: BufferSettings = msgspec.field(default_factory=BufferSettings)
    learner: LearnerSettings = msgspec.field(default_factory=LearnerSettings)
    weights: WeightsSettings = msgspec.field(default_factory=WeightsSettings)
    engine: EngineSettings = msgspec.field(default_factory=EngineSettings)
    eval: EvalSettings = msgspec.field(default_factory=EvalSettings)
    supervision: SupervisionSettings = msgspec.field(default_factory=SupervisionSettings)
    placement: PlacementSettings = msgspec.field(default_factory=PlacementSettings)
    recorder: RecorderSettings = msgspec.field(default_factory=RecorderSettings)
    start: StartSettings = msgspec.field(default_factory=StartSettings)

    @property
    def trains(self) -> bool:
        """Whether a learner runs; without one, engines serve the model as it is."""
        return not self.only or "learner" in self.only

    @property
    def origin(self) -> int:
        """Step of the weights before the first batch; below 0 before a warm-up."""
        return self.start.step - self.warmup.steps

    @property
    def ahead(self) -> int:
        """Batches packed ahead of the one in training."""
        return min(1, self.buffer.max_lag) if self.buffer.ahead < 0 else self.buffer.ahead
