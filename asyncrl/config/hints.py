"""Configs that work, but slower or otherwise than their author may expect."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from asyncrl.algorithms.lag import open_groups, slots_within_lag
from asyncrl.config.engine_settings import Capability, EngineGroup
from asyncrl.config.harness_settings import harness_name
from asyncrl.config.held_out import graded_tasks, tasks_of_sets
from asyncrl.config.pools import purpose_of
from asyncrl.config.sandbox_settings import weaker_limits
from asyncrl.config.settings import Config, CreateModelSettings, RolloutSettings
from asyncrl.config.slots import all_slots, first_slots, rollout_workers
from asyncrl.config.tasks import largest_group, tasks_of
from asyncrl.ports import is_loopback

_FILE_ENDINGS = (".jsonl", ".parquet")


def busy_share(config: Config) -> float:
    """Expected upper share of rollout slots at work, 0 to 1.

    Of the (max_lag + 1) * B groups that may be open about 2 B are in training or wait for it; at least the B groups of
    the next batch are being sampled.
    """
    slots = _slot_groups(config)
    batch = config.buffer.batch_groups
    return min(1.0, max(config.buffer.max_lag - 1, 1) * batch / slots)


_MASKED = ((1.0, 0.02), (1.5, 0.16), (2.0, 0.2), (math.inf, 0.21))
"""Shares of tokens that become too old, by multiples of the slots within the lag bound; `benchmarks/loop_model.py`."""


def masked_share(config: Config) -> float:
    """Expected share of sampled tokens that become too old for their batch, 0 to 1, with usual spreads of lengths."""
    lag, rows = config.buffer.max_lag, config.buffer.batch_groups * largest_group(config)
    if not (lag and config.trains):
        return 0.0
    multiple = all_slots(config) / slots_within_lag(rows, lag)
    before = (0.0, 0.0)
    for after in _MASKED:
        if multiple < after[0]:
            break
        before = after
    span = after[0] - before[0]
    part = (multiple - before[0]) / span if 0 < span < math.inf else 0.0
    return before[1] + part * (after[1] - before[1])


def slot_lines(config: Config, _base: Path) -> Iterator[str]:
    """Tell how busy the rollout slots will be, and how many of their tokens too old for their batch."""
    if config.rolls_out and config.trains:
        count = all_slots(config)
        auto = " at first" if config.rollout.slots == "auto" else ""
        yield (
            f"{count} rollout slots{auto}: about {busy_share(config):.0%} busy, about {masked_share(config):.0%} of "
            "their tokens too old"
        )


def _slot_groups(config: Config) -> float:
    """Groups that all rollout slots hold together."""
    return all_slots(config) / largest_group(config)


def _busy_slots(config: Config) -> int:
    """Slots of each rollout worker that the groups which are open keep busy."""
    slots = _slot_groups(config) * busy_share(config) * largest_group(config)
    return max(1, int(slots // rollout_workers(config)))


def hints(config: Config) -> list[str]:
    """Return all of them as text."""
    return [*_speed_hints(config), *_meaning_hints(config)]


_BUSY_ENOUGH = 0.95  # share of busy slots that needs no hint
_MASKED_ENOUGH = 0.05  # share of tokens that become too old that needs no hint


def _speed_hints(config: Config) -> Iterator[str]:
    if config.rolls_out:
        yield from _slot_hints(config)
        yield from _scaling_hints(config)
    yield from _gpu_hints(config)
    if not _training_servers(config):
        yield "there are no engines: trajectories wait until `asyncrl engines add URL` announces one"


def _training_servers(config: Config) -> list[EngineGroup]:
    """Return the groups of which servers that start with the run sample for training."""
    groups = [group for pool, group in config.engine.pools.items() if purpose_of(config, pool) == "training"]
    return [group for group in groups if group.servers]


def _slot_hints(config: Config) -> Iterator[str]:
    rollout, lag, batch = config.rollout, config.buffer.max_lag, config.buffer.batch_groups
    slots, opened = _slot_groups(config), open_groups(batch, lag)
    if busy_share(config) < _BUSY_ENOUGH:
        yield (
            f"at most {busy_share(config):.0%} of the rollout slots ({slots:g} groups) will be busy: "
            f"(max_lag + 1) * batch_groups = {opened} groups may be open. Larger batches (buffer.batch_groups = "
            f"{math.ceil(slots / max(lag - 1, 1))}) or fewer slots (rollout.slots = {_busy_slots(config)}) keep all "
            f"busy; so does older data, buffer.max_lag = {math.ceil(slots / batch) + 1}"
        )
    elif (masked := masked_share(config)) > _MASKED_ENOUGH and rollout.slots != "auto":
        yield (
            f"about {masked:.0%} of the sampled tokens will be too old for their batch: "
            f"{all_slots(config)} rollout slots are more than end within buffer.max_lag = {lag}; "
            'rollout.slots = "auto" chooses fewer'
        )
    running = sum(group.servers * group.max_running for group in _training_servers(config))
    addressed = any(group.can(Capability.ADDRESSES) for group in config.engine.pools.values())
    if not addressed and rollout.slots != "auto" and all_slots(config) > running:
        yield (
            f"{all_slots(config)} rollout slots share {running} running requests "
            "(engine.count * engine.max_running): the rest queue in the servers"
        )


def _scaling_hints(config: Config) -> Iterator[str]:
    if (pool := config.autoscale.pools.get("rollout")) is not None and config.rollout.slots == "auto":
        yield (
            f'rollout.slots = "auto" keeps prompts waiting, so autoscale.pools.rollout grows to {pool.max} workers; '
            f"set rollout.slots, such as {first_slots(config)}"
        )


def _gpu_hints(config: Config) -> Iterator[str]:
    """Find GPUs on which servers meet, each of which takes nearly all of their memory unless it is told otherwise."""
    device, users = config.learner.device, Counter[int]()
    users.update([int(device.partition(":")[2] or 0)] if device.startswith("cuda") else [])
    greedy = dict[int, tuple[str, str]]()
    for table, group in config.engine.tables.items():
        if group.on_gpus:
            gpus = group.gpus or [*range(group.gpus_needed)] * group.count
            users.update(gpus)
            option = group.of_kind.memory_option
            if not group.value_of(option):
                greedy.update(dict.fromkeys(gpus, (table, option)))
    for gpu in [gpu for gpu in sorted(users) if users[gpu] > 1 and gpu in greedy][:1]:
        table, option = greedy[gpu]
        yield (
            f"{users[gpu]} processes share GPU {gpu}, and a server takes nearly all of its memory: name other "
            f"{table}.gpus, or its share by {option} in {table}.arguments"
        )


def _meaning_hints(config: Config) -> Iterator[str]:
    stall_s, deadline_s = config.workers.stall_s, config.buffer.group_deadline_s
    if stall_s >= deadline_s:
        yield (
            f"workers.stall_s = {stall_s:g} s is not below buffer.group_deadline_s = {deadline_s:g} s: groups may end "
            "first"
        )
    if config.model.path and config.model.create != CreateModelSettings():
        yield "model.create is not used: model.path names a model"
    if config.learner.lora.rank and not (config.model.path or config.start.checkpoint):
        yield (
            "learner.lora.rank: the model that the run makes has random weights, which adapters leave as they are: it "
            "hardly learns; name a model in model.path"
        )
    for key, rising, steps in (
        ("warmup.lr_warmup_steps", config.warmup.lr_warmup_steps, config.warmup.steps),
        ("learner.lr_warmup_steps", config.learner.lr_warmup_steps, config.learner.steps),
    ):
        if steps and rising > steps:
            yield f"{key} = {rising} exceeds the {steps} steps: the learning rate never reaches its peak"
    evaluated = tasks_of_sets(config) or (tasks_of(config) if config.eval.prompts else {})
    for task in evaluated.values():
        held_out = task.eval_source or task.source
        if held_out == task.source and held_out.partition("@")[0].endswith(_FILE_ENDINGS):
            key = task.keys("eval_source")[0]
            yield f"evaluation takes the rows that are trained on, {held_out}; set {key}, such as rows.jsonl@[0:9]"
    if not is_loopback(config.nats.host):
        yield (
            f"nats.host = {config.nats.host}: other machines reach the server, which uses no TLS: passwords and tokens "
            "travel unencrypted; for TLS run a server of your own, and name it in nats.url"
        )
    for table, group in config.engine.tables.items():
        yield from group.of_kind.hints(table, group, config.model.path)
    yield from _sampling_hints(config.rollout)
    if any(harness_name(task.rollout) for task in graded_tasks(config).values()):
        yield from (f"sandbox: on this machine {limit}" for limit in weaker_limits(config.sandbox))


def _sampling_hints(rollout: RolloutSettings) -> Iterator[str]:
    cuts = [("top_p", rollout.top_p < 1.0), ("top_k", rollout.top_k > 0), ("min_p", rollout.min_p > 0.0)]
    named = ", ".join(f"rollout.{key} = {getattr(rollout, key):g}" for key, is_cut in cuts if is_cut)
    if named:
        yield (
            f"{named}: tokens are sampled from a part of the distribution, while log-probs, ratios and ess are of "
            "the whole one; the trained policy differs slightly from the sampler"
        )
