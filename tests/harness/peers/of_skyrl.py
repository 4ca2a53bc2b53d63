"""SkyRL."""

from functools import partial
from types import SimpleNamespace

import torch
from skyrl.backends.skyrl_train.utils import ppo_utils

from harness.peers.inputs import WIDTH, at_the_end, graded, kept

PROMPTS = [(0, 3), (3, 5), (5, 6)]
OPTIONAL = """tis_ratio_type sequence_mask_metric outlier_token_is_threshold_low outlier_token_is_threshold_high
token_mask_is_threshold_low token_mask_is_threshold_high"""
NO_CORRECTION = dict.fromkeys(OPTIONAL.split())


def cases(made):
    """Return the results of SkyRL's functions, by the name of the case."""
    return {**advantages(made), **losses(made), **corrected(made), **others(made)}


def advantages(made):
    mask, index = made["mask"].float(), made["groups"].numpy()
    whole = torch.ones_like(mask)
    found = {}

    def add(name, function, mask=mask, rewards=None, **options):
        rewards = at_the_end(made) if rewards is None else rewards
        found[name] = kept(function, function(rewards, response_mask=mask, **options)[0][mask > 0])

    add("grpo", ppo_utils.compute_grpo_outcome_advantage, index=index)
    add("rloo", ppo_utils.compute_rloo_outcome_advantage, index=index)
    ends = torch.zeros_like(mask)
    ends[:, -1] = made["rewards"]
    add("reinforce++", ppo_utils.compute_reinforce_plus_plus_outcome_advantage, whole, ends, gamma=1.0)
    compute, options = ppo_utils.compute_gae_advantage_return, {"gamma": 0.9, "lambd": 0.8}
    returns = compute(ends + made["penalties"], made["values"], whole, **options)[1]
    return found | {"gae, returns": kept(compute, returns)}


def loss_case(made, function, reduction="token_mean", *, of="token_advantages", correction=(), **options):
    """Loss and gradient of a policy loss, which is a sum over tokens of advantages that were scaled before."""
    mask = made["mask"].float()
    scaled = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
        made[of], mask, reduction, micro_batch_size=2, max_seq_len=WIDTH + 2, prompt_boundaries=PROMPTS
    )
    config = SimpleNamespace(
        **{"policy_loss_type": "regular", "loss_reduction": "sequence_mean", "eps_clip_low": 0.2} | options,
        off_policy_correction=SimpleNamespace(**NO_CORRECTION | dict(correction)),
    )

    def compute(current):
        return function(current, made["start"], scaled, config, mask, made["sampler"])[0]

    return kept(function, graded(compute, made))


def losses(made):
    ppo, clips = ppo_utils.ppo_policy_loss, {"eps_clip_low": 0.2, "eps_clip_high": 0.28}
    case = partial(loss_case, made)
    reductions = ("token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm")
    held = SimpleNamespace(cispo_eps_clip_low=0.2, cispo_eps_clip_high=0.28)
    tv = SimpleNamespace(dppo_type="binary_tv", delta_low=0.05, delta_high=0.05)
    kl = SimpleNamespace(dppo_type="binary_kl", delta_low=0.01, delta_high=0.01)
    gspo = {"of": "row_advantages", "eps_clip_low": 0.05, "eps_clip_high": 0.08}
    return {
        **{f"ppo, {name}": case(ppo, name, **clips) for name in reductions},
        "ppo, dual clip": case(ppo, policy_loss_type="dual_clip", clip_ratio_c=1.3, **clips),
        "gspo": case(ppo_utils.gspo_policy_loss, "sequence_mean", **gspo),
        "cispo": case(ppo_utils.compute_policy_loss_cispo, cispo=held),
        "dppo, tv": case(ppo_utils.dppo_policy_loss, dppo=tv),
        "dppo, kl": case(ppo_utils.dppo_policy_loss, dppo=kl),
        "rollout_is": case(ppo_utils.rollout_is_policy_loss, eps_clip_low=0.3, eps_clip_high=0.4),
        "importance sampling": case(ppo_utils.importance_sampling_loss),
    }


def corrected(made):
    clips = {"eps_clip_low": 0.2, "eps_clip_high": 0.28}
    case = partial(loss_case, made, ppo_utils.ppo_policy_loss, **clips)
    bounds = {"token_mask_is_threshold_low": 0.7, "token_mask_is_threshold_high": 1.4}
    return {
        "decoupled, token tis": case(correction={"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.3}),
        "decoupled, product tis": case(correction={"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.3}),
        "decoupled, icepop": case(correction={"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1e6, **bounds}),
    }


def others(made):
    mask, estimate = made["mask"].float(), ppo_utils.compute_approx_kl

    def kl(name):
        return graded(lambda current: estimate(current, made["reference"], mask, name).sum(), made)

    def value_loss(values):
        config = SimpleNamespace(value_clip=0.5)
        return ppo_utils.ppo_critic_loss(values, made["values_before"], made["returns"], config, mask)[0]

    found = {f"kl, {name}": kept(estimate, kl(name)) for name in ("k1", "k2", "k3")}
    loss = graded(value_loss, made, "values")
    return found | {"value loss": kept(ppo_utils.ppo_critic_loss, loss)}
