"""The engines of judges and opponents: with the first version of the run, or with a second model."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from actors.runtime.actor import Context
from actors.runtime.engines import follow_fleet, open_fleet
from asyncrl.config.pools import Purpose, model_of
from asyncrl.data.model_dir import check_model_directory, model_info
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.generator import Generator
from asyncrl.engine.request_options import RequestOptions


def model_path(context: Context, purpose: Purpose) -> Path:
    """The directory of the model that the engines of a purpose have."""
    own = model_of(context.config, purpose)
    return context.files.base / own if own else context.files.model_path(context.config.model)


def tokenizer_of(context: Context, purpose: Purpose) -> TaskTokenizer:
    """The tokenizer of that model.

    Raises:
        TokenizerError: its directory has none.
    """
    return TaskTokenizer.load(model_path(context, purpose), skip_special=context.config.rollout.skip_special_tokens)


async def open_generator(
    context: Context, tokenizer: TaskTokenizer, stack: AsyncExitStack, *, purpose: Purpose
) -> Generator:
    """Follow the engines of a purpose; the stack closes them.

    Args:
        tokenizer: of their model.
        purpose: of these engines; all but those of training have the first version of the run, or a second model.
    """
    config = context.config
    check = model_info if model_of(config, purpose) else check_model_directory
    model = check(model_path(context, purpose))
    served = model._replace(context=min(model.context, config.engine.context or model.context))
    fleet = open_fleet(context)
    stack.push_async_callback(fleet.close)
    stack.push_async_callback((await follow_fleet(context, fleet, purpose)).close)
    manner = RequestOptions(in_place=config.weights.update == "in_place" and purpose == "training")
    return Generator(fleet, served, tokenizer.decode_all, counts=context.vitals, manner=manner)
