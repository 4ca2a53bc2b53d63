"""How much room the payload streams of a cast need: what is open, and what the kept checkpoints do not contain yet."""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.settings import Cast

TRIM_SHARE = 0.5  # of a payload stream's room: above it, a trim need not wait for the next checkpoint
CHECKPOINT_SHARE = 0.7  # above it, the learner is asked for a checkpoint
PAUSE_SHARE = 0.9  # above it, admission is paused: the rest is for trajectories that are already open

_TOKEN_BYTES = 13  # of a result: id 4, mask 1, log-prob 4, version 4
_PROGRESS_BYTES = 12  # of a token in a progress message: id, log-prob, version
_ENTRY_BYTES = 256  # of a progress entry, besides its tokens
_TEXT_BYTES = 5  # of a token as text, at most on average
_MESSAGE_BYTES = 2048  # headers, ids, the task's row


class Room(NamedTuple):
    """Bytes, if every trajectory were as long as it may become."""

    trajectory: int  # result and progress of one trajectory
    batch: int  # results of one batch
    least: int  # open work, and batches between two checkpoints in a row: with less a run may stop for ever
    full: int  # open work, and the batches that the kept checkpoints do not contain: no checkpoint before its turn


def payload_room(cast: Cast) -> Room:
    """What the trajectories of RL need."""
    rollout, groups = cast.rollout, cast.buffer.batch_groups
    tokens = _longest(cast)
    result = tokens * (_TOKEN_BYTES + _TEXT_BYTES) + _MESSAGE_BYTES
    # Progress stays until there is a result: the message that names the log, and an entry for each stretch of tokens.
    sampled, limit = min(tokens, rollout.max_new_tokens), rollout.progress_limit
    entries = 2 * sampled // limit if rollout.max_new_tokens > limit else 0
    stored = sampled * _PROGRESS_BYTES + entries * _ENTRY_BYTES + _MESSAGE_BYTES if entries else 0
    trajectory = result + stored
    batch = groups * rollout.group_size * result
    open_work = (cast.buffer.max_lag + 1) * groups * rollout.group_size * trajectory
    kept = max(2, cast.learner.keep_checkpoints) * cast.learner.checkpoint_every
    return Room(trajectory, batch, open_work + 2 * batch, open_work + min(kept, cast.learner.steps) * batch)


def _longest(cast: Cast) -> int:
    """Tokens of the longest trajectory: the context, where it is known; else a prompt as long as its answer."""
    context = cast.model.create.context if not cast.model.path else 2 * cast.rollout.max_new_tokens
    return cast.engine.context or context
