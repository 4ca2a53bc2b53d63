"""Tokens that end an answer, as `asyncrl check` prints them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.settings import Config
from asyncrl.data.tokenizer import TaskTokenizer


def stop_token_lines(config: Config, base: Path) -> Iterator[str]:
    """Yield the tokens at which engines end an answer of the model in `model.path`, or a hint if it names no token."""
    if not (config.model.path and config.rolls_out):
        return
    tokenizer = TaskTokenizer.load(base / config.model.path)
    if tokenizer.eos_ids:
        line = f"stop tokens: {', '.join(tokenizer.decode_all([token]) for token in tokenizer.eos_ids)}"
        if tokenizer.stop_ids:
            line += " (the last one ends a turn in the chat template; the other files of the model do not name it)"
        yield line
    elif not config.rollout.stop:
        yield (
            f"hint: {config.model.path} names no token that ends an answer, so each answer has rollout.max_new_tokens "
            f"= {config.rollout.max_new_tokens} tokens; set eos_token_id in its generation_config.json, or rollout.stop"
        )
