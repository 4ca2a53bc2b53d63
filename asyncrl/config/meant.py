"""The setting that is meant by a name that no setting has: a typing error, or the name of another framework."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from asyncrl.config.reference import join_key, known_settings

_NEAR = 0.76  # likeness of two names of which one may be meant by the other: a letter is wrong, missing or too many

FOREIGN = {
    "actor.optim.lr": "learner.lr",
    "adam_beta1": "learner.betas",
    "adam_beta2": "learner.betas",
    "adv_estimator": "learner.advantage",
    "advantage_estimator": "learner.advantage",
    "async_level": "buffer.max_lag",
    "batch_size": "buffer.batch_groups",
    "beta": "learner.reference.kl_coef",
    "betas1": "learner.betas",
    "betas2": "learner.betas",
    "ckpt.interval": "learner.checkpoint_every",
    "clip_grad": "learner.max_grad_norm",
    "clip_ratio": "learner.loss_options.clip_low",
    "clip_ratio_c": "learner.loss_options.dual_clip",
    "clip_ratio_high": "learner.loss_options.clip_high",
    "clip_ratio_low": "learner.loss_options.clip_low",
    "cliprange_value": "learner.critic.value_clip",
    "context_parallel": "learner.layout.context",
    "context_parallel_size": "learner.layout.context",
    "cp": "learner.layout.context",
    "critic.optim.lr": "learner.critic.lr",
    "critic_lr": "learner.critic.lr",
    "custom_generate_function_path": "task.rollout",
    "custom_reward_function.path": "reward.function",
    "custom_rm_path": "reward.function",
    "data.max_response_length": "rollout.max_new_tokens",
    "data.path": "task.source",
    "data.train_batch_size": "buffer.batch_groups",
    "data.train_files": "task.source",
    "data.val_files": "eval.source",
    "dataset": "task.source",
    "dataset_name": "task.source",
    "enable_gradient_checkpointing": "learner.recompute",
    "entropy_coef": "learner.loss_options.entropy",
    "entropy_coeff": "learner.loss_options.entropy",
    "ep": "learner.layout.expert",
    "eps_clip": "learner.loss_options.clip_low",
    "eps_clip_c": "learner.loss_options.dual_clip",
    "eps_clip_high": "learner.loss_options.clip_high",
    "epsilon": "learner.loss_options.clip_low",
    "epsilon_high": "learner.loss_options.clip_high",
    "eval.interval": "eval.every",
    "eval_interval": "eval.every",
    "eval_prompt_data": "eval.source",
    "eval_steps": "eval.every",
    "expert_model_parallel_size": "learner.layout.expert",
    "gamma": "learner.critic.discount",
    "gpu_memory_utilization": "engine.arguments",
    "grad_clip": "learner.max_grad_norm",
    "gradient_checkpointing": "learner.recompute",
    "hf_checkpoint": "model.path",
    "input_key": "task.options",
    "kl_coef": "learner.loss_options.kl",
    "kl_ctrl.kl_coef": "learner.reference.kl_coef",
    "kl_loss_coef": "learner.loss_options.kl",
    "kl_loss_type": "learner.loss_options.kl_estimator",
    "label_key": "task.options",
    "lam": "learner.critic.gae_lambda",
    "lambd": "learner.critic.gae_lambda",
    "learning_rate": "learner.lr",
    "lora_alpha": "learner.lora.alpha",
    "lora_rank": "learner.lora.rank",
    "loss_agg_mode": "learner.aggregation",
    "loss_type": "learner.loss",
    "lr": "learner.lr",
    "lr_decay_style": "learner.schedule",
    "lr_scheduler_type": "learner.schedule",
    "lr_warmup_iters": "learner.lr_warmup_steps",
    "lrate": "learner.lr",
    "max_async_level": "buffer.max_lag",
    "max_completion_length": "rollout.max_new_tokens",
    "max_grad_norm": "learner.max_grad_norm",
    "max_new_tokens": "rollout.max_new_tokens",
    "max_off_policy_steps": "buffer.max_lag",
    "max_response_length": "rollout.max_new_tokens",
    "max_staleness": "buffer.max_lag",
    "max_steps": "learner.steps",
    "max_tokens": "rollout.max_new_tokens",
    "max_tokens_per_gpu": "learner.micro_batch_tokens",
    "model.name": "model.path",
    "model.partial_pretrain": "model.path",
    "model_name_or_path": "model.path",
    "n_samples_per_eval_prompt": "eval.samples",
    "n_samples_per_prompt": "rollout.group_size",
    "num_epoch": "task.epochs",
    "num_generations": "rollout.group_size",
    "num_rollout": "learner.steps",
    "num_train_epochs": "task.epochs",
    "optim.lr": "learner.lr",
    "per_device_train_batch_size": "learner.micro_batch_tokens",
    "pipeline_model_parallel_size": "learner.layout.pipeline",
    "pp": "learner.layout.pipeline",
    "ppo_max_token_len_per_gpu": "learner.micro_batch_tokens",
    "ppo_mini_batch_size": "buffer.batch_groups",
    "prompt_data": "task.source",
    "reward_fn": "reward.function",
    "reward_funcs": "reward.function",
    "rm_type": "reward.function",
    "rollout.n": "rollout.group_size",
    "rollout_batch_size": "buffer.batch_groups",
    "rollout_max_response_len": "rollout.max_new_tokens",
    "rollout_temperature": "rollout.temperature",
    "rollout_top_k": "rollout.top_k",
    "rollout_top_p": "rollout.top_p",
    "rollouts_per_example": "rollout.group_size",
    "save_freq": "learner.checkpoint_every",
    "save_interval": "learner.checkpoint_every",
    "save_steps": "learner.checkpoint_every",
    "save_total_limit": "learner.keep_checkpoints",
    "temperature": "rollout.temperature",
    "tensor_model_parallel_size": "learner.layout.tensor",
    "test_freq": "eval.every",
    "top_k": "rollout.top_k",
    "top_p": "rollout.top_p",
    "total_epochs": "task.epochs",
    "total_training_steps": "learner.steps",
    "tp": "learner.layout.tensor",
    "train_batch_size": "buffer.batch_groups",
    "train_files": "task.source",
    "ulysses_sequence_parallel_size": "learner.layout.context",
    "val_files": "eval.source",
    "value_clip": "learner.critic.value_clip",
    "warmup_steps": "learner.lr_warmup_steps",
    "weight_decay": "learner.weight_decay",
}
"""Settings by names of slime, verl, TRL and prime-rl; a name with dots is the end of a dotted key."""


def meant_by(key: str, siblings: Iterable[str]) -> list[str]:
    """Return the settings that an unknown key may mean: in its own table first, then by another framework's name.

    Args:
        key: dotted.
        siblings: names in the table of the key.
    """
    siblings, (prefix, _, name) = list(siblings), key.rpartition(".")
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=_NEAR) or [
        sibling for sibling in siblings if sibling.startswith(name)
    ]
    if close:
        return [join_key(prefix, sibling) for sibling in close]
    parts = key.lower().replace("-", "_").split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    if foreign := next((FOREIGN[end] for end in ends if end in FOREIGN), None):
        return [foreign]
    # What a stage changes is meant where the run has it.
    names = {known: known.rpartition(".")[2] for known in known_settings() if not known.startswith("stages.")}
    nearest = difflib.get_close_matches(name, names.values(), n=1, cutoff=_NEAR)
    elsewhere = [known for known, last in names.items() if [last] == nearest]
    below = [known for known in elsewhere if prefix and names[known] == name and known.startswith(f"{prefix}.")]
    if len(below) == 1 and ".NAME." not in below[0]:
        return below
    return elsewhere if len(elsewhere) == 1 or not prefix else []  # one of several tables is a guess


def option_meant_by(name: str, options: Iterable[str]) -> str:
    """Return the option of a loss that an unknown option may mean; "" for none."""
    options = list(options)
    last = FOREIGN.get(name, "").rpartition(".")[2]
    return last if last in options else next(iter(difflib.get_close_matches(name, options, n=1, cutoff=_NEAR)), "")
