"""Rewards that keep groups from a batch: those that hang, and those that fail."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.tasks import tasks_of
from asyncrl.state.facts import finding
from asyncrl.state.run_state import RunState
from topics.stalls import StallFound

GRADERS = ("reward", "groupreward")  # roles that grade: single trajectories, and whole groups


def hanging_rewards(state: RunState, ill: set[str], *, held_s: float) -> Iterator[StallFound]:
    """Trajectories, or groups, that are being graded for too long, one for each worker.

    Args:
        ill: actors whose reports are old.
        held_s: seconds without progress after which work hangs while nothing is trained.
    """
    limits = state.config.reward
    for role in GRADERS:
        seen: set[str] = set()
        for actor, work in state.held(role):
            if actor.actor_id in ill | seen or work.quiet_s < held_s or work.waiting.on == "turn":
                continue
            seen.add(actor.actor_id)
            done = int((actor.gauge("graded") or 0) + (actor.gauge("failed") or 0))
            queue = state.queues.get(role, {})
            limit = f"reward.time_limit_s is {limits.time_limit_s:g}"
            if role == "groupreward" and any(task.tournament for task in tasks_of(state.config).values()):
                limit = f"reward.tournament_limit_s is {limits.tournament_limit_s:g}"
            evidence = (
                f"grades {work.id} for {work.held_s:.0f} s, {done:,} done before; {role} workers have "
                f"{queue.get('under_way', 0):,}, {queue.get('waiting', 0):,} more wait; {limit}"
            )
            yield finding("reward hanging", actor.actor_id, evidence)


def failing_rewards(state: RunState) -> Iterator[StallFound]:
    """Groups that ended because their rewards failed, since the newest batch."""
    failed, groups = state.failed.new.get("reward", 0), state.drops.get("failed", 0)
    if failed and groups:
        of_groups = all(task.reward_scope == "group" for task in tasks_of(state.config).values())
        evidence = (
            f"{failed:,} trajectories got no reward since the last batch, and {groups:,} groups ended with that; "
            f"the last failure: {state.failed.last}"
        )
        yield finding("reward failing", "groupreward" if of_groups else "reward", evidence)
