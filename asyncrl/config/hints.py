"""What will work, but slower or otherwise than the writer of a cast may think."""

from __future__ import annotations

import math
from collections.abc import Iterator

from asyncrl.config.settings import Cast, CreateModelSettings
from asyncrl.ports import is_loopback

_FILE_ENDINGS = (".jsonl", ".parquet")


def busy_share(cast: Cast) -> float:
    """Expected upper share of rollout slots at work, 0 to 1.

    Of the (max_lag + 1) * B groups that may be open about 2 B are in training or wait for it; at least the B groups of
    the next batch are being sampled.
    """
    slots = _slot_groups(cast)
    batch = cast.buffer.batch_groups
    return min(1.0, max(cast.buffer.max_lag - 1, 1) * batch / slots)


def _slot_groups(cast: Cast) -> float:
    """Groups that all rollout slots hold together."""
    return cast.rollout.workers * cast.rollout.slots / cast.rollout.group_size


def hints(cast: Cast) -> list[str]:
    """All of them, in words."""
    return [*_speed_hints(cast), *_meaning_hints(cast)]


_BUSY_ENOUGH = 0.95  # share of busy slots that needs no hint


def _speed_hints(cast: Cast) -> Iterator[str]:
    rollout, lag, batch = cast.rollout, cast.buffer.max_lag, cast.buffer.batch_groups
    slots, open_groups = _slot_groups(cast), (lag + 1) * batch
    if busy_share(cast) < _BUSY_ENOUGH:
        yield (
            f"at most {busy_share(cast):.0%} of the rollout slots ({slots:g} groups) will be busy: "
            f"(max_lag + 1) * batch_groups = {open_groups} groups may be open; "
            f"buffer.max_lag = {math.ceil(slots / batch) + 1} would keep all busy"
        )
    running = cast.engine.count * cast.engine.max_running
    if cast.engine.kind != "external" and rollout.workers * rollout.slots > running:
        yield (
            f"{rollout.workers * rollout.slots} rollout slots share {running} running requests "
            "(engine.count * engine.max_running): the rest queue in the servers"
        )


def _meaning_hints(cast: Cast) -> Iterator[str]:
    stall_s, deadline_s = cast.rollout.stall_s, cast.buffer.group_deadline_s
    if stall_s >= deadline_s:
        yield (
            f"rollout.stall_s = {stall_s:g} s is not below buffer.group_deadline_s = {deadline_s:g} s: groups may end "
            "first"
        )
    if cast.model.path and cast.model.create != CreateModelSettings():
        yield "model.create is not used: model.path names a model"
    for key, rising, steps in (
        ("warmup.lr_warmup_steps", cast.warmup.lr_warmup_steps, cast.warmup.steps),
        ("learner.lr_warmup_steps", cast.learner.lr_warmup_steps, cast.learner.steps),
    ):
        if steps and rising > steps:
            yield f"{key} = {rising} exceeds the {steps} steps: the learning rate never reaches its peak"
    held_out = cast.eval.source or cast.task.source
    if cast.eval.prompts and held_out == cast.task.source and held_out.partition("@")[0].endswith(_FILE_ENDINGS):
        yield f"evaluation takes the rows that are trained on, {held_out}; set eval.source, such as rows.jsonl@[0:9]"
    if not is_loopback(cast.nats.host):
        yield (
            f"nats.host = {cast.nats.host}: other machines reach the server, which speaks no TLS: passwords and tokens "
            "travel unencrypted; for TLS run a server of your own, and name it in nats.url"
        )
    yield from _sampling_hints(cast)


def _sampling_hints(cast: Cast) -> Iterator[str]:
    rollout = cast.rollout
    cuts = [("top_p", rollout.top_p < 1.0), ("top_k", rollout.top_k > 0), ("min_p", rollout.min_p > 0.0)]
    named = ", ".join(f"rollout.{key} = {getattr(rollout, key):g}" for key, is_cut in cuts if is_cut)
    if named:
        yield (
            f"{named}: tokens are sampled from a part of the distribution, while log-probs, ratios and ess are of "
            "the whole one; what is trained is not quite the policy that sampled"
        )
