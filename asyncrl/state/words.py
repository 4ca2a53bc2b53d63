"""Text for people of what actors report as structs."""

from __future__ import annotations

from topics.actors import Activity, Waiting

_WAITING = {
    "function": "in the rollout function",
    "engine": "{name}",
    "retry": "{name} after {fault}",
    "version": "an engine with version {version}",
    "tool": "tool {name}",
    "reward": "its reward",
    "evaluation": "answers and their rewards",
    "publish": "a publish",
    "turn": "its turn",
    "isolated": "in a process of its own",
}
_ACTIVITIES = {
    "": "has not reported its activity",
    "loading": "loads the model",
    "training": "trains batch {number}",
    "publishing": "copies version {number}",
    "saving": "copies checkpoint {number}",
    "awaiting batch": "waits for batch {number}",
    "making row": "makes row {number}",
    "standby": "stands by",
    "taking over": "takes over",
}


def waiting_text(waiting: Waiting) -> str:
    """Return what a piece of work waits for, or where it runs."""
    return _WAITING[waiting.on].format(name=waiting.name, version=waiting.version, fault=waiting.fault)


def activity_text(activity: Activity) -> str:
    """Return what an actor does."""
    return _ACTIVITIES[activity.kind].format(number=activity.number)
