"""Log-probs of the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from asyncrl.engine.embedded.model import Block, Model
from asyncrl.engine.embedded.request import PromptScores

_CHUNK_TOKENS = 256
"""Tokens of one forward pass, and of the logits that are held."""


def read_prompt(model: Model, prompt: list[int], slot: int, scores: PromptScores) -> Iterator[None]:
    """Fill the log-probs of a prompt, at temperature 1 as SGLang has them, and those of the likeliest tokens.

    It stops where other work of the process may be done.

    Args:
        slot: one of the model that no request has.
    """
    ids = torch.tensor(prompt)
    for first in range(0, len(prompt) - 1, _CHUNK_TOKENS):
        part = torch.arange(first, min(first + _CHUNK_TOKENS, len(prompt) - 1))
        logits = yield from model.read(Block(ids[part][None], part[None], torch.tensor([slot])))
        part, logits = part[part >= scores.start], logits[part >= scores.start]
        logprobs = logits.log_softmax(-1)
        scores.logprobs += logprobs.gather(1, ids[part + 1, None]).squeeze(1).tolist()
        if scores.top:
            values, tokens = logprobs.topk(min(scores.top, logprobs.shape[1]))
            pairs = zip(values.tolist(), tokens.tolist(), strict=True)
            scores.likeliest += [list(zip(*place, strict=True)) for place in pairs]
    scores.open = False
