"""TRL."""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import torch
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.trainer.grpo_trainer import GRPOTrainer

from harness.peers.inputs import WIDTH, graded, kept

SETTINGS = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.28,
    "beta": 0.0,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "max_completion_length": WIDTH + 2,
    "aux_loss_enabled": False,
    "use_vllm": False,
    "vllm_importance_sampling_correction": False,
    "_entropy_bonus_enabled": False,
    "use_adaptive_entropy": False,
    "entropy_coef": 0.0,
}


def cases(made):
    """Return the results of the loss of TRL's GRPO trainer, by the name of the case."""
    case = partial(loss_case, made)
    return {
        **{f"ppo, {name}": case(loss_type=name) for name in ("grpo", "bnpo", "dapo", "dr_grpo")},
        "ppo, two-sided": case(delta=1.3),
        "gspo": case("row_advantages", importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.08),
        "cispo": case(loss_type="cispo", epsilon_high=1.3),
        "opsm": case("row_advantages", off_policy_mask_threshold=0.02),
        "kl": case(beta=0.1),
        "kl, unbiased": case(beta=0.1, use_bias_correction_kl=True),
        **{f"distillation, {name}": distillation(made, beta) for name, beta in (("forward", 0), ("reverse", 1))},
        "entropy bonus": case(loss_type="bnpo", _entropy_bonus_enabled=True, entropy_coef=0.05),
    }


def distillation(made, beta):
    """The divergence over the whole vocabulary, and its gradient for the logits."""
    function = GKDTrainer.generalized_jsd_loss

    def compute(logits):
        return function(logits[None], made["teacher_logits"][None], beta=beta, reduction="sum")

    return kept(function, graded(compute, made, "logits"))


def loss_case(made, of="token_advantages", *, delta=None, use_bias_correction_kl=False, **options):
    """Loss and gradient of an evaluation, which is not divided by steps of accumulation."""

    def compute(current):
        ids, mask = torch.zeros(current.shape, dtype=torch.long), made["mask"].float()
        trainer = SimpleNamespace(
            **SETTINGS | options,
            args=SimpleNamespace(delta=delta, use_bias_correction_kl=use_bias_correction_kl),
            model=SimpleNamespace(training=False),
            accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
            _metrics=defaultdict(lambda: defaultdict(list)),
            _get_per_token_logps_and_entropies=lambda *_, **__: (current, made["entropies"], None),
            get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        )
        inputs = {
            **{"prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1], "completion_ids": ids, "completion_mask": mask},
            "advantages": made[of],
            "old_per_token_logps": made["start"],
            "sampling_per_token_logps": made["start"],
            "ref_per_token_logps": made["reference"],
            "num_items_in_batch": mask.sum(),
        }
        return GRPOTrainer._compute_loss(trainer, None, inputs)

    return kept(GRPOTrainer._compute_loss, graded(compute, made))
