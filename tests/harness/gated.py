"""A rollout function behind a gate: the last steps of a run wait until its test has done what comes before its end."""

import asyncio
import shutil
from pathlib import Path

from asyncrl.rollout.context import RolloutContext, single_turn
from topics.ids import TASK
from topics.prompts import PromptRow

_GATE = Path(__file__).with_name("gate")
_POLL_S = 0.1  # as many trajectories look as there are open ones


def closed_gate(folder: Path, prompts: int) -> Path:
    """Put this module into a folder as `gated.py`; its gate, which is returned, lets so many prompts of RL through.

    Once the file is gone, all of them pass.
    """
    shutil.copy(__file__, folder / "gated.py")
    gate = folder / "gate"
    gate.write_text(str(prompts))
    return gate


async def pass_gate(context: RolloutContext) -> None:
    """Wait where the gate is closed for the prompt of a trajectory."""
    prompt_id: str = context._host._issued.prompt_id  # type: ignore[attr-defined]
    while prompt_id.startswith(TASK) and _is_closed_for(int(prompt_id[1:])):  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(_POLL_S)


def _is_closed_for(prompt: int) -> bool:
    try:
        return prompt >= int(_GATE.read_text())
    except FileNotFoundError:
        return False


async def rollout(row: PromptRow, context: RolloutContext) -> None:
    """Answer as the default function does, behind the gate."""
    await pass_gate(context)
    await single_turn(row, context)
