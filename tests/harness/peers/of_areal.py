"""AReaL."""

from functools import partial

import torch
from areal.api.cli_args import RejectionSamplingConfig
from areal.trainer.ppo.actor import _apply_m2po_masking, compute_prox_logp_approximations
from areal.utils.data import KLEstimator
from areal.utils.functional import functional

from harness.peers.inputs import graded, kept

CLIPS = {"eps_clip": 0.2, "eps_clip_higher": 0.28}


def cases(made):
    """Return the results of AReaL's functions, by the name of the case."""
    case = partial(loss_case, made)
    found = {
        "ppo, dual clip": case(c_clip=1.3),
        "decoupled, token clamp": case(level="token", action="clamp", upper=1.3),
        "decoupled, token mask": case(level="token", action="mask", lower=0.7, upper=1.4),
        "decoupled, sequence clamp": case(level="sequence", action="clamp", lower=0.95, upper=1.05),
        "decoupled, sequence mask": case(level="sequence", action="mask", lower=0.9, upper=1.1),
        "gspo": case(of="row_advantages", eps_clip=0.05, eps_clip_higher=0.08, importance_sampling_level="sequence"),
        "interpolated": interpolated(made),
        "m2po": m2po(made),
        "over-long": overlong(made),
        "value loss": value_loss(made),
    }
    return found | {f"kl, {name}": kl(made, name) for name in ("k1", "k2", "k3")}


def loss_case(made, of="token_advantages", *, level=None, action="mask", lower=None, upper=2.0, **options):
    reject = None
    if level:
        reject = RejectionSamplingConfig(level, action, metric="ratio", agg="mean", upper=upper, lower=lower)
    arguments = CLIPS | options | {"rejection_sampling": reject, "loss_mask": made["mask"]}

    def compute(current):
        function = functional.ppo_actor_loss_fn
        return function(current, made["start"], made["sampler"], made[of], **arguments)[0]

    return kept(functional.ppo_actor_loss_fn, graded(compute, made))


def interpolated(made):
    """Proximal log-probs at version 9, one of each token sampled `lags` versions before."""
    compute = compute_prox_logp_approximations
    found = compute(made["sampler"], made["current"], 9 - made["lags"], 9, "loglinear")
    return kept(compute, found["loglinear"][made["mask"]])


def m2po(made):
    """Tokens that are kept."""
    found = _apply_m2po_masking(made["sampler"], made["start"], made["mask"], 0.05)
    return kept(_apply_m2po_masking, found[made["mask"]])


def overlong(made):
    """Punishments of rows of 3 to 7 tokens, where 4 are free and 8 too many."""
    function, mask = functional.reward_overlong_penalty, made["mask"]
    data = {"rewards": torch.zeros(len(mask)), "input_ids": mask, "loss_mask": mask}
    return kept(function, function(data, 4, 1.0, 8)["rewards"])


def value_loss(made):
    def compute(values):
        before, returns = made["values_before"], made["returns"]
        return functional.ppo_critic_loss_fn(values, before, returns, 0.5, made["mask"])[0]

    return kept(functional.ppo_critic_loss_fn, graded(compute, made, "values"))


def kl(made, name):
    estimate = KLEstimator(name, apply_clamp=False)
    mask = made["mask"].float()
    return kept(KLEstimator, graded(lambda current: (estimate(current, made["reference"]) * mask).sum(), made))
