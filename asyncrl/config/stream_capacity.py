"""The room that a run needs, estimated from its settings.

Bytes of streams are those that the server counts: subject, headers, body, and its overhead for each message. A run that
needs more than its estimate stalls at a full stream or a full disk, and continues once there is room.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from asyncrl.algorithms.lag import open_groups
from asyncrl.config.check_learner import needed_columns
from asyncrl.config.held_out import held_out_sets
from asyncrl.config.pools import keep_first
from asyncrl.config.process_settings import NatsSettings
from asyncrl.config.settings import Config, CreateModelSettings
from asyncrl.config.tasks import largest_group, tasks_of
from topics.trajectories import ARTEFACT_BYTES

MB = 1_000_000
RESERVE_MB = 200  # of a disk stay free: a server whose disk is full writes no more, and logs grow, too
TRIM_SHARE = 0.5  # of a payload stream's room: above it, a trim need not wait for the next checkpoint
CHECKPOINT_SHARE = 0.7  # above it, the learner is asked for a checkpoint
PAUSE_SHARE = 0.9  # above it, admission is paused: the rest is for trajectories that are already open

_ON_DISK = 1.2  # bytes on the disk for one that the server counts
_IN_LOG = 600  # of a trajectory in the log of prompts, the largest one
_IN_LOGS = 1_200  # of a trajectory in all logs
_STEP = 10_000  # of a step in all logs, without its trajectories
_BASE = 100_000  # of a log: claims, heartbeats, starts and stops
_RESULT = 700  # of a trajectory's tokens, without them
_TOKEN = 18  # id 4, mask 1, log-prob 4, version 4, text 5
_SPARE = 16 * MB
_STATE = {"float32": 12, "bfloat16": 8}  # of a parameter in a checkpoint: float32, and two moments of this type
_REFERENCE = 4  # of a parameter of the reference model in a checkpoint


class Needs(NamedTuple):
    """The bytes that a run needs."""

    log: int  # of the largest log at the end of the run
    logs: int  # of all logs at the end of the run
    step: int  # that a step adds to all logs
    tokens: int  # of trajectories: open work and two batches; with less a run may stop for ever
    tokens_kept: int  # open work, and the batches that the kept checkpoints do not contain
    tokens_made: int  # open work, and all batches of the run
    files: int  # of weights and checkpoints

    @property
    def ample(self) -> int:
        """The room of a payload stream in which no checkpoint comes before its turn."""
        return math.ceil(self.tokens_kept / CHECKPOINT_SHARE) + _SPARE

    @property
    def streams(self) -> int:
        """The least room for all streams together."""
        return self.logs + self.tokens


def needs(config: Config, row_bytes: float, parameters: int = 0, route_bytes: int = 0) -> Needs:
    """Return what a run needs if every trajectory is as long as it may become.

    Args:
        row_bytes: of a row of the data, on average.
        parameters: of the model.
        route_bytes: of the experts of a token, where engines return them.
    """
    buffer, warmup, learner = config.buffer, config.warmup, config.learner
    steps, members = learner.steps - config.start.step, buffer.batch_groups * largest_group(config)
    answers, evaluations = sum(one.members for one in held_out_sets(config).values()), 0.0
    if answers:  # of the versions that are due, and of the first and the last one
        evaluations = (1 / config.eval.every if config.eval.every else 0.0) + 2 / max(1, steps)
    rows, trajectories = buffer.batch_groups + evaluations * answers, members + evaluations * answers

    def logged(bytes_each: int, base: int) -> tuple[float, float]:
        """Bytes at the end of the run, and of a step."""
        step = rows * row_bytes + trajectories * bytes_each + base
        warm = warmup.batch_rows * row_bytes + warmup.batch_groups * bytes_each + base
        return _BASE + steps * step + warmup.steps * warm, step

    gives = any(task.rollout != "single_turn" for task in tasks_of(config).values())
    result = _longest(config) * (_TOKEN + route_bytes) + row_bytes + _RESULT + 2 * ARTEFACT_BYTES * gives
    stays = gives or _most_new_tokens(config) > config.rollout.progress_limit  # progress, until there is a result
    opened = (open_groups(members, buffer.max_lag) + answers) * result * (1 + stays)
    batch = members * result
    warm = (buffer.max_lag + 3) * (warmup.batch_rows * (row_bytes * _TOKEN + _RESULT) if warmup.steps else 0)
    (logs, step), (log, _) = logged(_IN_LOGS, _STEP), logged(_IN_LOG, 0)
    return Needs(
        log=math.ceil(log),
        logs=math.ceil(logs) + MB,
        step=math.ceil(step),
        tokens=math.ceil(max(opened + 2 * batch, warm) / PAUSE_SHARE),
        tokens_kept=math.ceil(max(opened + min(learner.kept_steps, learner.steps) * batch, warm)),
        tokens_made=math.ceil(opened + learner.steps * batch),
        files=_files(config, parameters),
    )


def store_limit(nats: NatsSettings) -> int:
    """Return the bytes that all streams may hold on each server that a run starts; 0: no limit."""
    return counted(nats.disk_max_mb * MB, nats)


def counted(disk_bytes: float, nats: NatsSettings) -> int:
    """Return the bytes of streams that take this much of a disk, on all servers that a run starts there."""
    return math.floor(max(0.0, disk_bytes) / _ON_DISK / nats.servers)


def created_parameters(create: CreateModelSettings) -> int:
    """Parameters of a model that is made: those of `asyncrl.training.init_model`."""
    attention = 2 * (create.heads + create.kv_heads) * create.head_dim
    return create.hidden * (2 * (len(create.alphabet) + 3) + create.layers * (attention + 3 * create.ffn))


def _files(config: Config, parameters: int) -> int:
    """Bytes of the kept weights and checkpoints, those that are written, and what engines hold."""
    learner, weights = config.learner, config.weights
    columns = {column for _, column in needed_columns(config)}
    trained = _STATE[learner.moments]
    state = trained + _REFERENCE * ("reference" in columns) + trained * ("values" in columns)
    versions = learner.keep_versions + 3 + sum(group.servers for group in config.engine.pools.values())
    versions += (weights.full_every - 1) * (weights.delta != "never") + keep_first(config)
    if weights.gate_metric or config.gateway.engines:  # those that are or were live, and those under evaluation
        versions += weights.keep_live + learner.keep_versions
    width = 4 if learner.dtype == "float32" else 2
    return parameters * ((learner.keep_checkpoints + 1) * state + versions * width)


def _longest(config: Config) -> int:
    """Tokens of the longest trajectory: the context, if known; otherwise a prompt as long as its answer."""
    context = config.model.create.context if not config.model.path else 2 * _most_new_tokens(config)
    return config.engine.context or context


def _most_new_tokens(config: Config) -> int:
    """Of a generation of RL or of an evaluation."""
    return max(config.rollout.max_new_tokens, *(own.max_new_tokens for own in held_out_sets(config).values()), 0)
