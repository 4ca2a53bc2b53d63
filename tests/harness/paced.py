"""A rollout function that takes a second: training goes on, and leaves the machine to other tests."""

import asyncio

from asyncrl.rollout.context import RolloutContext, single_turn
from topics.prompts import PromptRow


async def rollout(row: PromptRow, context: RolloutContext) -> None:
    """Answer as the default function does, a second later."""
    await asyncio.sleep(1.0)
    await single_turn(row, context)
