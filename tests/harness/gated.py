"""A rollout function behind a gate: a run does not end before its test has done what comes before the end."""

import asyncio
import os
import shutil
from pathlib import Path

from asyncrl.rollout.context import RolloutContext, single_turn
from topics.ids import TASK
from topics.prompts import PromptRow

_GATE = Path(__file__).with_name("gate")
_POLL_S = 0.1  # as many trajectories look as there are open ones


def closed_gate(folder: Path, version: int) -> Path:
    """Put this module into a folder as `gated.py`; its gate, which is returned, holds what is sampled by a version on.

    So the run trains `buffer.max_lag` steps behind that version at most, however many groups are dropped, until the
    file is gone.
    """
    shutil.copy(__file__, folder / "gated.py")
    gate = folder / "gate"
    move(gate, version)
    return gate


def move(gate: Path, version: int) -> None:
    """Let a gate hold what is sampled by another version on."""
    written = gate.with_name("moved")
    written.write_text(str(version))
    os.replace(written, gate)  # whoever looks finds the one or the other


async def pass_gate(context: RolloutContext) -> None:
    """Wait behind the generations of a trajectory of RL, where the gate is closed for one of their versions."""
    prompt_id: str = context._host._issued.prompt_id  # type: ignore[attr-defined]
    newest = max(int(segment.versions.max()) for segment in context.segments())
    while prompt_id.startswith(TASK) and _is_closed_for(newest):  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(_POLL_S)


def _is_closed_for(version: int) -> bool:
    try:
        return version >= int(_GATE.read_text())
    except FileNotFoundError:
        return False


async def rollout(row: PromptRow, context: RolloutContext) -> None:
    """Answer as the default function does, and wait at the gate."""
    await single_turn(row, context)
    await pass_gate(context)
