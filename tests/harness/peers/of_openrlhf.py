"""OpenRLHF."""

from functools import partial

from openrlhf.models.loss import PolicyLoss, SFTLoss, ValueLoss
from openrlhf.models.utils import compute_approx_kl

from harness.peers.inputs import graded, kept

CLIPS = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}


def cases(made):
    """Return the results of OpenRLHF's functions, by the name of the case."""
    case = partial(policy, made)
    off = {"is_correction_level": "token"}
    return {
        "ppo, by token": case(**CLIPS),
        "ppo, by sample": case(token_level_loss=False, **CLIPS),
        "ppo, dual clip": case(dual_clip=1.3, **CLIPS),
        "gspo": case("row_advantages", policy_loss_type="gspo", clip_eps_low=0.05, clip_eps_high=0.08),
        "decoupled, tis": case(is_correction_mode="clip", is_correction_threshold=[0.8, 1.3], **off, **CLIPS),
        "decoupled, icepop": case(is_correction_mode="mask", is_correction_threshold=[0.7, 1.4], **off, **CLIPS),
        "value loss": value(made),
        "sft": sft(made),
        **{f"kl, {name}": kl(made, name) for name in ("k1", "k2", "k3")},
    }


def policy(made, of="token_advantages", **options):
    loss = PolicyLoss(**options)

    def compute(current):
        return loss(current, made["start"], made[of], made["mask"].float(), made["sampler"])[0]

    return kept(PolicyLoss, graded(compute, made))


def value(made):
    def compute(values):
        return ValueLoss(clip_eps=0.5)(values, made["values_before"], made["returns"], made["mask"].float())

    return kept(ValueLoss, graded(compute, made, "values"))


def sft(made):
    return kept(SFTLoss, graded(lambda current: SFTLoss()(current, made["mask"].float()), made))


def kl(made, name):
    mask = made["mask"].float()

    def compute(current):
        return (compute_approx_kl(current, made["reference"], kl_estimator=name) * mask).sum()

    return kept(compute_approx_kl, graded(compute, made))
