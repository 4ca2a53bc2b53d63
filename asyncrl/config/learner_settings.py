"""Settings of tables below learner: further models, the division of the model, filters, assertions.

The comment of a field documents it: `asyncrl settings` and docs/reference/settings.md print the comment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from asyncrl.algorithms.distillation import DIRECTIONS
from asyncrl.algorithms.filters import FILTERS, Garbage, Length, PassRate, Repetition
from asyncrl.algorithms.kl import KL_ESTIMATORS
from asyncrl.algorithms.named import names
from asyncrl.config.setting_types import Count, NonNegative, Positive, Rate, Seconds, Settings, Share, kind_name

DOCUMENTED_TRAINERS, _FURTHER = ("torch", "megatron"), ("scripted",)
TRAINERS = DOCUMENTED_TRAINERS + _FURTHER
"""The kinds of trainers: the module `asyncrl.training.NAME.kind` describes each, and has it as `KIND`."""

if TYPE_CHECKING:
    DirectionName: TypeAlias = str
    EstimatorName: TypeAlias = str
    TrainerName: TypeAlias = str
else:
    TrainerName = kind_name(DOCUMENTED_TRAINERS, _FURTHER)
    DirectionName = Literal[names(DIRECTIONS)]
    EstimatorName = Literal[names(KL_ESTIMATORS)]

EXPERTS = "experts"
"""Target of adapters that stands for all projections of routed experts."""

_Projection: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]*\Z")]


class PenaltySettings(Settings):
    """A penalty in the reward of each token: -coef * KL from the policy to another model."""

    kl_estimator: EstimatorName = "k1"  # Estimate of that KL by a sampled token (docs/guides/algorithms.md).
    # Log-probs of the policy in that KL: the sampler's, or the trainer's before the update, which take another pass.
    kl_of: Literal["sampler", "trainer"] = "sampler"


class ReferenceSettings(PenaltySettings):
    """The reference model, a frozen copy of the policy at the first step of RL, made where an objective needs it."""

    # Versions after which the copy is renewed; 0: never.
    refresh_every: Count = 0
    kl_coef: NonNegative = 0.0  # Weight of the KL from the reference in the reward of each token; 0: none.


class TeacherSettings(PenaltySettings):
    """The teacher of on-policy distillation: a second model in the learner, or an inference server."""

    model: str = ""  # Hugging Face model directory with the tokenizer of the policy, which the learner loads.
    # `http://` address of a server of such a model (SGLang, or the embedded engine), instead of `model`.
    url: str = ""
    api_key_file: str = ""  # File with the API key of that server, if it needs one.
    in_flight: Positive = 16  # Rows that each rank asks that server for at once.
    timeout_s: Seconds = 120.0  # Seconds that one answer may take before it is asked for again.
    # Seconds without any answer of that server (away, silent, or faulty), after which the run ends.
    deadline_s: Seconds = 1800.0
    # Weight of the KL from the teacher, in addition to the rewards: with `advantage = "zero"` it is the only signal.
    coef: NonNegative = 1.0
    # The KL is added to the loss, over this many tokens that the teacher finds most probable and one outcome of all
    # others; 0: it is in the reward, estimated by the sampled token alone. More than the vocabulary are the vocabulary.
    top_k: Count = 0
    # With `top_k`: KL(policy || teacher), KL(teacher || policy), or half the sum of both.
    direction: DirectionName = "reverse"

    @property
    def given(self) -> bool:
        """Return whether there is a teacher."""
        return bool(self.model or self.url)


class LoraSettings(Settings):
    """Low-rank adapters, trained instead of the weights."""

    rank: Count = 0  # Rank of an adapter; 0: none, all weights are trained.
    alpha: Rate = 32.0  # An adapter counts alpha / rank times.
    # Versions that engines get: "merged": whole models with the adapters in them; "adapter": the adapters alone, which
    # each engine's host adds to `model`.
    publish: Literal["merged", "adapter"] = "merged"
    # Linear modules of every layer that have an adapter, by the last part of their names; `experts` stands for all
    # projections of routed experts, with `publish = "merged"`, and in the torch trainer one rank.
    targets: Annotated[list[_Projection], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


class CriticSettings(Settings):
    """The critic of PPO, a second model in the learner, on the devices of the policy, where an advantage is `gae`."""

    # Hugging Face model directory that it begins as, below its head, with the tokenizer of the policy; empty: `model`.
    model: str = ""
    warmup_steps: Count = 0  # First steps of RL, in which the critic is trained alone.
    lr: Rate = 1e-5  # Its learning rate.
    lr_warmup_steps: Count = 0  # Steps over which its learning rate rises from 0.
    betas: tuple[Share, Share] = (0.9, 0.95)  # AdamW decay rates of the two moments.
    weight_decay: NonNegative = 0.0  # AdamW weight decay.
    max_grad_norm: Rate = 1.0  # Gradient norm above which gradients are scaled down.
    discount: Share = 1.0  # Factor of the rewards of later tokens, gamma, for each token between.
    gae_lambda: Share = 0.95  # Bias of the advantages to the critic (0) or to the rewards that came (1).
    # Distance from the value before the update at which a value is clipped in the loss; 0: none.
    value_clip: NonNegative = 0.2


class LayoutSettings(Settings):
    """The division of the model over the ranks of the trainer `megatron`; ranks beyond one model hold its replicas.

    The trainer `torch` has `context` alone.
    """

    # Ranks that share each matrix product, and the tokens between products; a divisor of the key-value heads.
    tensor: Positive = 1
    # Stages of consecutive layers; the first stages have one layer more if the layers do not divide.
    pipeline: Positive = 1
    # Ranks that share the tokens of each document, cut into twice as many chunks. A micro-batch is divided over them.
    context: Positive = 1
    # Chunks of consecutive layers in each stage: micro-batches meet shorter stages, and wait less for one another.
    virtual: Positive = 1
    # Ranks of a stage, of one replica or of several, that share the experts; a divisor of the experts.
    expert: Positive = 1
    # Ranks of a stage that share the matrices of each expert; a divisor of its channels.
    expert_tensor: Positive = 1
    # Layers that the head counts as, where layers are spread over stages: the last stage has as many fewer.
    head: Count = 0


class FilterOptions(Settings):
    """Options of the filters that `learner.filters` names."""

    pass_rate: PassRate = PassRate()
    length: Length = Length()
    repetition: Repetition = Repetition()
    garbage: Garbage = Garbage()

    def of(self, filters: list[str]) -> dict[str, dict[str, object]]:
        """Options of some filters by name; those without options are left out."""
        return {name: msgspec.to_builtins(getattr(self, name)) for name in filters if FILTERS[name].__struct_fields__}


class AssertionSettings(Settings):
    """Bounds on differences of log-probs, and on the usual range; 0 asserts nothing."""

    # Greatest `mismatch_k3` (nats per token) of the first step of RL: its tokens were sampled from the weights that
    # train on them, so that only arithmetic and sampling cuts make the two differ.
    first_k3: NonNegative = 0.0
    # Greatest distance from 0 of `reference_kl` and `reference_k3` (nats per token) in the first step: the reference is
    # the policy itself then. With `learner.reference.kl_of = "sampler"` the gap to the sampler is part of the former.
    first_kl: NonNegative = 0.0
    k3: NonNegative = 0.0  # Greatest `mismatch_k3` (nats per token) of any step of RL, with the lag of its tokens.
    # A step is an anomaly, and its trajectories are named, if its gradient norm exceeds this many times the median of
    # the last 32 steps, or its loss is this many times farther from their median than the median distance (which counts
    # as at least 0.05: advantages that cancel leave losses of rounding).
    outlier: NonNegative = 10.0
    # Effect of a step beyond a bound: `report` continues with a finding, `stop` ends the run before the step is
    # reported.
    broken: Literal["report", "stop"] = "report"
