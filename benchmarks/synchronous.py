"""The synchronous reference: GRPO on one task in one loop, in plain torch, from the checkpoint of a run.

The loop shares with the product only the task and its random numbers: rows, tokenizer, names and seeds of the
trajectories, and the draw of a token by seed and position. `python -m benchmarks.synchronous CONFIG BASE KEY=VALUE ...`
prints the rewards by step, starting with the weights of the run in the folder BASE.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from actors.prompter.actor import sampling_seed
from asyncrl.config.load import load_config
from asyncrl.config.settings import Config
from asyncrl.data.sources import open_source
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.embedded.sampling import inverse_cdf, mix, uniforms
from asyncrl.rollout.journal import seed_of_call
from benchmarks.oracle_results import reached
from benchmarks.oracle_run import checkpoint_of
from topics.ids import prompt_name

_LETTER = "p"  # of prompts of the task
_CAP = 2.0  # of the importance weights, `correction_cap`


class _Sampled(NamedTuple):
    """Trajectories of a batch, padded on the right to T tokens."""

    tokens: torch.Tensor  # [R, T]
    mask: torch.Tensor  # [R, T] true where the policy sampled
    logprobs: torch.Tensor  # [R, T]
    texts: list[str]


class Synchronous:
    """A policy that samples a batch, trains on it, and samples the next."""

    def __init__(self, config: Config, model: Path, checkpoint: Path) -> None:
        """
        Args:
            config: config of the run, for task, seeds, sizes and learning rates; the objective is the default one.
            model: directory of the run's model, for tokenizer and shape.
            checkpoint: directory of its weights and optimiser after step 0.
        """
        self._config = config
        self._tokenizer = TaskTokenizer.load(model)
        self._rows = open_source(config.task.source, options=config.task.options, seed=config.seed, base=Path())
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._stops = torch.tensor(self._tokenizer.eos_ids)
        learner = config.learner
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=0.0, betas=learner.betas, weight_decay=learner.weight_decay
        )
        self._load(checkpoint)

    def step(self, number: int) -> float:
        """Make step `number`, from 1, and return the mean reward of its batch."""
        config, learner = self._config, self._config.learner
        groups, size = config.buffer.batch_groups, config.rollout.group_size
        places = range((number - 1) * groups, number * groups)
        rows = [self._rows.row(place) for place in places]
        members = [row for row in rows for _ in range(size)]
        names = [f"{prompt_name(_LETTER, place)}-{member}" for place in places for member in range(size)]
        sampled = self._sample(
            [self._tokenizer.encode_prompt(row, max_tokens=None) for row in members],
            [seed_of_call(sampling_seed(config.seed, name, 0), "0") for name in names],
        )
        rewards = torch.tensor(
            [float(text.strip() == str(row.label)) for row, text in zip(members, sampled.texts, strict=True)],
            dtype=torch.float64,
        ).view(groups, size)
        spread = rewards.std(1, keepdim=True)
        advantages = torch.where(spread > 0, (rewards - rewards.mean(1, keepdim=True)) / (spread + 1e-6), 0.0)
        loss = self._loss(sampled, advantages.flatten().float())
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), learner.max_grad_norm)
        share = 0.5 * (1 + math.cos(math.pi * number / (learner.steps + 1))) if learner.schedule == "cosine" else 1.0
        self._optimizer.param_groups[0]["lr"] = learner.lr * share
        self._optimizer.step()
        return float(rewards.mean())

    def _loss(self, sampled: _Sampled, advantages: torch.Tensor) -> torch.Tensor:
        """Truncated importance sampling, averaged over the tokens of the batch."""
        logits = self._model(sampled.tokens[:, :-1]).logits
        targets, mask = sampled.tokens[:, 1:, None], sampled.mask[:, 1:]
        logprobs = logits.log_softmax(-1).gather(-1, targets).squeeze(-1)
        weights = (logprobs.detach() - sampled.logprobs[:, 1:]).exp().clamp(max=_CAP)
        terms = weights * (logprobs - logprobs.detach()).exp() * advantages[:, None]
        loss: torch.Tensor = -(terms * mask).sum() / mask.sum()
        return loss

    @torch.no_grad()
    def _sample(self, prompts: list[Any], seeds: list[int]) -> _Sampled:
        most = self._config.rollout.max_new_tokens
        count, lengths = len(prompts), torch.tensor([len(prompt) for prompt in prompts])
        tokens = torch.zeros(count, int(lengths.max()) + most, dtype=torch.int64)
        for index, prompt in enumerate(prompts):
            tokens[index, : len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
        mask, logprobs = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros(tokens.shape)
        mixed, every = mix(np.array(seeds, np.uint64)), torch.arange(count)
        running = torch.ones(count, dtype=torch.bool)
        for _ in range(most):
            last = lengths - 1
            probs = self._model(tokens[:, : int(lengths.max())]).logits[every, last].softmax(-1)
            draws = torch.from_numpy(uniforms(mixed, last.numpy())).unsqueeze(1)
            drawn = inverse_cdf(probs, draws)
            rows, places = every[running], lengths[running]
            tokens[rows, places], mask[rows, places] = drawn[running, 0], True
            logprobs[rows, places] = probs.gather(1, drawn)[running, 0].log()
            lengths += running
            running &= ~torch.isin(drawn[:, 0], self._stops)
            if not running.any():
                break
        texts = [self._tokenizer.decode(row[own].tolist()) for row, own in zip(tokens, mask, strict=True)]
        return _Sampled(tokens, mask, logprobs, texts)

    def _load(self, checkpoint: Path) -> None:
        with safe_open(checkpoint / "model.safetensors", "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # it is no dictionary
        with safe_open(checkpoint / "optimizer.safetensors", "pt") as file:
            moments = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # as above
        own = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])
                state = {kind: moments[f"{kind}.{name}"] for kind in ("step", "exp_avg", "exp_avg_sq")}
                self._optimizer.state[parameter] = state


def synchronous(config: str, run: Path, settings: Sequence[str]) -> list[float]:
    """Return the loop's rewards by step, from the weights after a run's warm-up until the goal is reached."""
    torch.set_num_threads(1)
    loaded = load_config(config, overrides=settings).config
    loop = Synchronous(loaded, run / "model", checkpoint_of(run))
    rewards: list[float] = []
    while len(rewards) < loaded.learner.steps and not reached(rewards):
        rewards.append(loop.step(len(rewards) + 1))
    return rewards


if __name__ == "__main__":
    print(json.dumps(synchronous(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])))
