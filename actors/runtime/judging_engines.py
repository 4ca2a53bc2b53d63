"""The engines of judges that are the run's own model: of live turns, and of rubrics."""

from __future__ import annotations

from contextlib import AsyncExitStack

from actors.runtime.actor import Context
from actors.runtime.engines import follow_fleet, open_fleet
from asyncrl.config.pools import Purpose
from asyncrl.data.model_dir import check_model_directory
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.generator import Generator
from asyncrl.engine.request_options import RequestOptions


async def open_generator(
    context: Context, tokenizer: TaskTokenizer, stack: AsyncExitStack, *, purpose: Purpose
) -> Generator:
    """Follow the engines that judge; the stack closes them.

    Args:
        purpose: of these engines; all but those of training have the first version of the run.
    """
    config = context.config
    model = check_model_directory(context.files.model_path(config.model))
    served = model._replace(context=config.engine.context or model.context)
    fleet = open_fleet(context)
    stack.push_async_callback(fleet.close)
    stack.push_async_callback((await follow_fleet(context, fleet, purpose)).close)
    manner = RequestOptions(in_place=config.weights.update == "in_place" and purpose == "training")
    return Generator(fleet, served, tokenizer.decode_all, counts=context.vitals, manner=manner)
