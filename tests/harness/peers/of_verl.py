"""verl."""

from functools import partial
from types import SimpleNamespace

import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits_v2
from verl.workers.config import ActorConfig

from harness.peers.inputs import WIDTH, at_the_end, graded, kept


def cases(made):
    """Return the results of verl's functions, by the name of the case."""
    return {**advantages(made), **losses(made), **corrected(made), **corrections(made), **others(made)}


def advantages(made):
    mask, rewards, index = made["mask"].float(), at_the_end(made), made["groups"].numpy()
    whole, pairs = torch.ones_like(mask), (made["groups"] > 0).long().numpy()  # rows of one length, in two groups
    found = {}

    def add(name, function, mask=mask, rewards=rewards, **options):
        found[name] = kept(function, function(rewards.clone(), response_mask=mask, **options)[0][mask > 0])

    add("grpo", core_algos.compute_grpo_outcome_advantage, index=index)
    add("grpo without std", core_algos.compute_grpo_outcome_advantage, index=index, norm_adv_by_std_in_grpo=False)
    add("grpo, vectorised", core_algos.compute_grpo_vectorized_outcome_advantage, index=index)
    add("rloo", core_algos.compute_rloo_outcome_advantage, index=index)
    add("rloo, vectorised", core_algos.compute_rloo_vectorized_outcome_advantage, index=index)
    add("reinforce++ baseline", core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage, whole, index=pairs)
    ends = whole.cumsum(1).eq(whole.shape[1]) * made["rewards"][:, None]
    summed = core_algos.compute_reinforce_plus_plus_outcome_advantage
    add("reinforce++", summed, whole, ends, config=AlgoConfig(gamma=1.0))
    compute = core_algos.compute_gae_advantage_return
    options = {"gamma": 0.9, "lam": 0.8}
    white, returns = compute(rewards + made["penalties"] * mask, made["values"], mask, **options)
    found["gae, whitened"] = kept(compute, white[mask > 0])
    found["gae, returns"] = kept(compute, returns[mask > 0])
    return found


def config(**options):
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)


def loss_case(made, function, mode="token-mean", *, anchor="start", of="token_advantages", weights=None, **options):
    """Loss and gradient of a policy loss."""
    scale = {"loss_scale_factor": WIDTH + 2} if mode == "seq-mean-token-sum-norm" else {}
    common = {"loss_agg_mode": mode, "config": config(**options, global_batch_info=scale)}
    arguments = {"advantages": made[of], "response_mask": made["mask"].float(), "rollout_is_weights": weights}

    def compute(current):
        return function(made[anchor], current, **arguments, **common)[0]

    return kept(function, graded(compute, made))


def losses(made):
    ppo, wide = core_algos.compute_policy_loss_vanilla, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    row = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}
    tight = {"clip_ratio": 0.05, "clip_ratio_low": 0.05, "clip_ratio_high": 0.05}
    case = partial(loss_case, made)
    modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    return {
        **{f"ppo, {mode}": case(ppo, mode, clip_ratio_c=1.3, **wide) for mode in modes},
        "gspo": case(core_algos.compute_policy_loss_gspo, "seq-mean-token-mean", of="row_advantages", **row),
        "cispo": case(core_algos.compute_policy_loss_cispo, **wide),
        "dppo, tv": case(core_algos.compute_policy_loss_dppo_tv, clip_ratio_c=20.0, **tight),
        "dppo, kl": case(core_algos.compute_policy_loss_dppo_kl, clip_ratio_c=20.0, **(dict.fromkeys(tight, 0.01))),
    }


def corrected(made):
    """Losses with weights of the trainer before the step, or of the trainer, over the sampler."""
    weigh, ppo = rollout_corr_helper.compute_rollout_correction_weights, core_algos.compute_policy_loss_vanilla
    wide, mask = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e6}, made["mask"].float()

    def weights(name, level, threshold):
        found, _ = weigh(made[name] - made["sampler"], mask, level, threshold)
        return found

    return {
        "decoupled, token tis": loss_case(made, ppo, weights=weights("start", "token", 1.3), **wide),
        "decoupled, icepop": loss_case(made, ppo, weights=weights("start", "token", "0.7_1.4"), **wide),
        "decoupled, product tis": loss_case(made, ppo, weights=weights("start", "sequence", 1.3), **wide),
        "reinforce, truncated": loss_case(
            made,
            core_algos.compute_policy_loss_reinforce,
            anchor="sampler",
            weights=weights("current", "token", 1.3),
        ),
    }


def corrections(made):
    """Weights, masks and figures of the ratio of trainer and sampler."""
    log_ratio, mask = made["current"] - made["sampler"], made["mask"].float()
    trained = made["mask"]
    weigh, reject = (
        rollout_corr_helper.compute_rollout_correction_weights,
        rollout_corr_helper.compute_rollout_rejection_mask,
    )
    measure = rollout_corr_helper.compute_offpolicy_metrics
    _, figures = weigh(log_ratio, mask, "token", 1e9)
    gap = measure(made["current"], made["sampler"], mask)
    return {
        "rejection, geometric": kept(reject, reject(log_ratio, mask, "seq_mean_k1", "0.85_1.1")[0][trained]),
        "rejection, product": kept(reject, reject(log_ratio, mask, "seq_sum_k1", "0.5_1.6")[0][trained]),
        "effective sample share": kept(weigh, torch.tensor([figures["rollout_is_eff_sample_size"]])),
        "mismatch k3": kept(measure, torch.tensor([gap["k3_kl"]])),
    }


def distillation(made):
    """The divergence over the teacher's four most probable tokens, and its gradient for the logits."""
    teacher, ids = made["teacher_logits"].log_softmax(-1).topk(4)
    teacher, ids = (torch.nested.as_nested_tensor([one], layout=torch.jagged) for one in (teacher, ids))
    settings = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None))

    def compute(logits):
        return compute_forward_kl_topk(logits[None], teacher, ids, settings, "thd")["distillation_losses"].sum()

    return kept(compute_forward_kl_topk, graded(compute, made, "logits"))


def others(made):
    mask, kl = made["mask"].float(), core_algos.kl_penalty
    found = {
        f"kl, {name}": kept(
            kl,
            graded(lambda current, name=name: (kl(current, made["reference"], name) * mask).sum(), made),
        )
        for name in ("k1", "k2", "k3")
    }

    def value_loss(values):
        return core_algos.compute_value_loss(values, made["returns"], made["values_before"], mask, 0.5)[0]

    return found | {
        "value loss": kept(core_algos.compute_value_loss, graded(value_loss, made, "values")),
        "distillation, forward": distillation(made),
        "entropy": kept(entropy_from_logits, entropy_from_logits(made["logits"])),
        "log-probs": kept(logprobs_from_logits_v2, logprobs_from_logits_v2(made["logits"], made["targets"])),
    }
