"""Our form of each policy loss of a peer that is recorded."""

from typing import NamedTuple

from asyncrl.algorithms.clipped_losses import Decoupled, Gspo, Ppo
from asyncrl.algorithms.held_losses import Cispo, Dppo, Reinforce
from asyncrl.algorithms.losses import Sft
from asyncrl.algorithms.token_loss import Loss


class Ours(NamedTuple):
    """Our form of a peer's loss. `value` is False where only the gradient is the same."""

    loss: Loss
    aggregation: str = "token"
    behaviour: str = "start"  # what the peer's ratio begins at
    advantages: str = "token_advantages"
    constant: int = 9
    value: bool = True


DUAL, PPO = Ppo(dual_clip=1.3), Ppo()
WIDE = {"clip_low": 0.05, "clip_high": 0.08}
BY_ROW = {"aggregation": "trajectory", "advantages": "row_advantages"}


def decoupled(level="token", correction="clamp", floor=0.0, cap=1.3):
    bounds = {"correction_floor": floor, "correction_cap": cap}
    loss = Decoupled(proximal="recomputed", correction=correction, correction_level=level, **bounds)
    return Ours(loss, behaviour="sampler")


POLICY_LOSSES = {
    "verl: ppo, token-mean": Ours(DUAL),
    "verl: ppo, seq-mean-token-mean": Ours(DUAL, "trajectory"),
    "verl: ppo, seq-mean-token-sum": Ours(DUAL, "constant", constant=1),
    "verl: ppo, seq-mean-token-sum-norm": Ours(DUAL, "constant"),
    "verl: gspo": Ours(Gspo(**WIDE), **BY_ROW),
    "verl: cispo": Ours(Cispo(clip_low=0.2, clip_high=0.28)),
    # Its loss is ratio A log p with the ratio held fixed, truncated at 20; ours, as the paper's, is ratio A.
    "verl: dppo, tv": Ours(Dppo(divergence_cap=0.05), value=False),
    "verl: dppo, kl": Ours(Dppo(divergence="kl", divergence_cap=0.01), value=False),
    "verl: decoupled, token tis": decoupled(),
    "verl: decoupled, icepop": decoupled(correction="mask", floor=0.7, cap=1.4),
    "verl: decoupled, product tis": decoupled("product"),
    # Its default aggregation is a sum per sequence; compared by token.
    "verl: reinforce, truncated": Ours(Reinforce(ratio_cap=1.3), behaviour="sampler"),
    "areal: ppo, dual clip": Ours(DUAL),
    "areal: decoupled, token clamp": decoupled(),
    "areal: decoupled, token mask": decoupled(correction="mask", floor=0.7, cap=1.4),
    "areal: decoupled, sequence clamp": decoupled("geometric", floor=0.95, cap=1.05),
    "areal: decoupled, sequence mask": decoupled("geometric", "mask", 0.9, 1.1),
    # Its gradient goes through the mean over the row; summed over the row it is that of the token form.
    "areal: gspo": Ours(Gspo(**WIDE), advantages="row_advantages"),
    # SkyRL divides advantages before the loss and sums.
    "skyrl: ppo, token_mean": Ours(PPO),
    "skyrl: ppo, sequence_mean": Ours(PPO, "trajectory"),
    "skyrl: ppo, prompt_mean": Ours(PPO, "group"),
    "skyrl: ppo, seq_mean_token_sum_norm": Ours(PPO, "constant"),
    "skyrl: ppo, dual clip": Ours(DUAL),
    "skyrl: gspo": Ours(Gspo(**WIDE), **BY_ROW),
    "skyrl: cispo": Ours(Cispo(clip_low=0.2, clip_high=0.28)),
    "skyrl: dppo, tv": Ours(Dppo(divergence_cap=0.05), behaviour="sampler"),
    "skyrl: dppo, kl": Ours(Dppo(divergence="kl", divergence_cap=0.01), behaviour="sampler"),
    # Its loss is ratio A log p, masked by the ratio of trainer and sampler, held fixed; ours has ratio 1 for log p.
    "skyrl: rollout_is": Ours(
        Decoupled(correction="mask", correction_floor=0.7, correction_cap=1.4), behaviour="sampler", value=False
    ),
    # Its loss is the ratio without a bound; ours holds the ratio fixed before log p.
    "skyrl: importance sampling": Ours(Reinforce(ratio_cap=1e6), value=False),
    "skyrl: decoupled, token tis": decoupled(),
    "skyrl: decoupled, product tis": decoupled("product"),
    "skyrl: decoupled, icepop": decoupled(correction="mask", floor=0.7, cap=1.4),
    "openrlhf: ppo, by token": Ours(PPO),
    "openrlhf: ppo, by sample": Ours(PPO, "trajectory"),
    "openrlhf: ppo, dual clip": Ours(DUAL),
    "openrlhf: gspo": Ours(Gspo(**WIDE), **BY_ROW),
    "openrlhf: decoupled, tis": decoupled(floor=0.8),
    "openrlhf: decoupled, icepop": decoupled(correction="mask", floor=0.7, cap=1.4),
    "openrlhf: sft": Ours(Sft()),
    "trl: ppo, grpo": Ours(PPO, "trajectory"),
    "trl: ppo, bnpo": Ours(PPO),
    "trl: ppo, dapo": Ours(PPO),
    "trl: ppo, dr_grpo": Ours(PPO, "constant"),
    "trl: ppo, two-sided": Ours(DUAL, "trajectory"),  # it bounds the ratio, also where A > 0, where the clip is lower
    "trl: gspo": Ours(Gspo(**WIDE), **BY_ROW),
    "trl: cispo": Ours(Cispo(clip_low=1.0, clip_high=0.3)),  # its bound is that of the ratio, not above 1
    "trl: opsm": Ours(Ppo(masks=["opsm"], opsm_cap=0.02), **BY_ROW),
    "trl: kl": Ours(Ppo(kl=0.1), "trajectory"),
    "trl: kl, unbiased": Ours(Ppo(kl=0.1, kl_unbiased=True), "trajectory"),
    # Its bonus is a mean over tokens, whatever the aggregation of the rest.
    "trl: entropy bonus": Ours(Ppo(entropy=0.05)),
}
