"""The room that each stream of a run takes: every formula that follows from the settings, once.

Bytes are those that the server counts: subject, headers, body, and its overhead for each message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.algorithms.lag import open_groups
from asyncrl.algorithms.policy_sums import LAG_EDGES
from asyncrl.config.check_learner import needed_columns
from asyncrl.config.engine_settings import EngineSettings
from asyncrl.config.held_out import held_out_sets
from asyncrl.config.pools import keep_first
from asyncrl.config.settings import Config, CreateModelSettings, LearnerSettings
from asyncrl.config.tasks import every_task, largest_group, tasks_of
from asyncrl.config.weights_settings import StoreCapability, WeightsSettings, store_kind
from topics.topic import (
    ACTORS,
    BATCHES,
    BLOBS,
    DEAD,
    ENGINES,
    FLEET,
    GRADES,
    HISTORY,
    LEDGER_BLOBS,
    PROMPTS,
    SECRETS,
    STREAMS,
    TRAINING,
    TRAJECTORIES,
    VITALS,
    WEIGHTS,
    Retention,
    Stream,
)
from topics.topic import TURNS as LIVE_TURNS
from topics.trajectories import ARTEFACT_BYTES, ARTEFACTS, METRICS, NAME_CHARS, TURNS
from topics.wire import INLINE_BYTES

MB = 1_000_000
RESERVE_MB = 200  # of a disk stay free: a server whose disk is full writes no more, and logs grow, too
TRIM_SHARE = 0.5  # of a payload stream's room: above it, a trim need not wait for the next checkpoint
CHECKPOINT_SHARE = 0.7  # above it, the learner is asked for a checkpoint
PAUSE_SHARE = 0.9  # above it, admission is paused: the rest is for trajectories that are already open

# Bytes of one message, measured; tests/config/test_stream_capacity.py compares them with a run.
_ISSUED = 570  # prompt.issued, without its row
_GRADED = 390
_MEMBER = 125  # of a batch.packed
_PACKED = 1_000  # batch.packed without members
_TRAINED = 800  # without figures of policy losses
_FIGURES, _FIGURES_OF_LAG = 300, 1_080  # of a policy loss, and those for the tokens of one bucket of lags
_PUBLISHED = 800
_SAVED = 400
_LOADED = 500  # engine.updating and engine.ready
_TURNS = 500  # card.requested and card.returned, and of each engine card.left and card.taken
_SCORED = 600  # eval.scored without members
_TRIMMED = 300
_NAMED = 400  # a message whose body is in a blob stream
_RESULT = 700  # trajectory.generated without tokens, text and row
_PROGRESS = 1_000  # trajectory.progressed, and the progress.stored that it names, without tokens
_STATE_BASE = 20_000  # of every snapshot
_OPEN_TRAJECTORY = 230  # in a snapshot of the buffer
_OPEN_GROUP = 40  # in a snapshot of the prompter
_KEPT_STEP = 100  # in a snapshot of the learner, for a step that the oldest kept checkpoint does not contain
_KEPT_GROUP, _KEPT_MEMBER = 20, 3  # in a snapshot of the supervisor, for such a step
_COUNTED = 512  # bytes of a message that count as a message where the next snapshot is due
_TOKEN = 13  # of a result: id 4, mask 1, log-prob 4, version 4
_TEXT = 5  # of a token as text, at most on average
_TURN = 9  # reward of a turn
_USUAL_TURNS = 32
# That a user's rollout function may give.
_OUTCOME = ARTEFACT_BYTES + (ARTEFACTS + METRICS) * (4 * NAME_CHARS + 16) + 2 * TURNS * _TURN
_PROGRESS_TOKEN = 12  # id, log-prob, version
_ENTRY = 256  # of a progress entry, without its tokens
_STATE = {"float32": 12, "bfloat16": 8}  # of a parameter in a checkpoint: float32, and two moments of this type
_REFERENCE = 4  # of a parameter of the reference model in a checkpoint

_TOKENIZER = 16 * MB  # of a version: its tokenizer and configuration
_CHUNKED = 1.01  # bytes in the stream for one of a version

_BASE = 100_000  # of every log: claims, heartbeats, starts and stops
_SPARE = 16 * MB  # for the unforeseen: groups that are dropped, actors that die, learners that begin again
_BY_TIME = 128 * MB  # of logs that grow with trims, stalls and starts, independent of training
_LETTERS = 64 * MB  # dead letters; when they are more, the oldest make room
_SIGNS = 64 * MB  # the newest vital signs of every actor
_MOMENTS = 16 * MB  # the course of a run: ten minutes by the second, six hours by ten, about a week by the minute
_KEYS = 64 * MB  # data keys, of about 300 bytes each
_UNKNOWN = 512 * MB  # a stream that nothing here computes
_SNAPSHOTS = 4  # of each keeper in the blob stream: two that stay, one that is written, one not purged yet


class PayloadSize(NamedTuple):
    """Bytes that payload takes, if every trajectory were as long as it may become."""

    trajectory: int  # result and progress of one trajectory
    batch: int  # results of one batch
    least: int  # open work, and batches between two checkpoints in a row: with less a run may stop for ever
    full: int  # open work, and the batches that the kept checkpoints do not contain: no checkpoint before its turn


class StreamNeed(NamedTuple):
    """Bytes that a stream has to hold until the end of a run."""

    stream: Stream
    least: int  # with less a run with these settings cannot reach its end
    ample: int  # with as much it is not slowed down, and there is room for the unforeseen
    step: int  # permanent growth of `least` per step of RL; 0 if unneeded messages are purged
    longest: int = 0  # the maximum that each step adds, where only the length of trajectories decides it


class Progress(NamedTuple):
    """The progress of a run that is resumed."""

    stored: dict[str, int]  # bytes in each stream, by name
    sizes: dict[str, int]  # bytes that each may hold
    trained: int  # steps so far, those of the warm-up too
    left: int  # steps to come, those of the warm-up too
    warms: bool = False  # its warm-up has not ended


def payload_room(config: Config, row_bytes: float) -> PayloadSize:
    """Return what trajectories of RL take.

    Args:
        row_bytes: of a row of the data, on average.
    """
    rollout = config.rollout
    gives = any(task.rollout != "single_turn" for task in tasks_of(config).values())
    tokens, outcome = _longest(config), _OUTCOME if gives else 0
    result = math.ceil(tokens * (_TOKEN + _TEXT) + row_bytes + _RESULT) + outcome
    # Progress stays until there is a result: the message that names the log, and an entry for each stretch of tokens.
    most = _most_new_tokens(config)
    sampled, limit = min(tokens, most), rollout.progress_limit
    entries = 2 * sampled // limit if most > limit else 0
    trajectory = result + (sampled * _PROGRESS_TOKEN + entries * _ENTRY + _PROGRESS + outcome if entries else 0)
    return _room(config, trajectory, result)


def _room(config: Config, trajectory: int, result: int) -> PayloadSize:
    """Return the needs of trajectories of this many bytes each, of which those of the result stay until they are
    trained.
    """
    members = config.buffer.batch_groups * largest_group(config)
    open_work = (open_groups(members, config.buffer.max_lag) + _answers(config)) * trajectory
    batch, kept = members * result, config.learner.kept_steps
    return PayloadSize(trajectory, batch, open_work + 2 * batch, open_work + min(kept, config.learner.steps) * batch)


def _trained(max_lag: int) -> int:
    return _TRAINED + _FIGURES + _FIGURES_OF_LAG * sum(edge <= max_lag for edge in LAG_EDGES)


def needs(
    config: Config, row_bytes: float, parameters: int = 0, route_bytes: int = 0, streams: Sequence[Stream] = STREAMS
) -> dict[str, StreamNeed]:
    """Return what every stream has to hold, by name.

    Args:
        row_bytes: of a row of the data, on average.
        parameters: of the model.
        route_bytes: of the experts of a token, where engines return them.
        streams: of the run.
    """
    groups, warmup, learner = config.buffer.batch_groups, config.warmup, config.learner
    members, rows = groups * largest_group(config), warmup.batch_groups
    turns = _TURN * _USUAL_TURNS * any(task.advantage == "turns" for task in every_task(config))
    packed = _PACKED + members * (_MEMBER + turns)
    inside = packed <= INLINE_BYTES
    evaluations, prompts = _evaluations(config), _answers(config)
    scored = _SCORED + prompts * _MEMBER
    score_inside = scored <= INLINE_BYTES
    turns_taken = _TURNS * (config.placement.colocate == "time_slice")
    saved, published = _SAVED / learner.checkpoint_every, 1 / learner.publish_every
    per_step = {  # of RL, and of the warm-up
        PROMPTS: (
            groups * row_bytes + members * _ISSUED + evaluations * prompts * (row_bytes + _ISSUED),
            warmup.batch_rows * row_bytes + rows * _ISSUED,
        ),
        GRADES: ((members + evaluations * prompts) * (_GRADED + turns), rows * _GRADED),
        BATCHES: (
            (packed if inside else _NAMED) + evaluations * (scored if score_inside else _NAMED),
            _PACKED + rows * _MEMBER,
        ),
        TRAINING: (
            _trained(config.buffer.max_lag) + saved + _PUBLISHED * published + _NAMED * evaluations + turns_taken,
            _TRAINED + saved + turns_taken,
        ),
        ENGINES: (_engines(config.engine) * (_LOADED * published + turns_taken), 0),
        FLEET: (_TRIMMED, _TRIMMED),
        ACTORS: (0, 0),
        LEDGER_BLOBS: ((0 if inside else packed) + (0 if score_inside else evaluations * scored), 0),
    }
    snapshots, warm_snapshots = _logged(config, members), _logged(config, rows)
    found = [
        _ledger(config, stream, step + snapshots.get(stream, 0), warm + warm_snapshots.get(stream, 0))
        for stream, (step, warm) in per_step.items()
    ]
    found += _payload(config, row_bytes, route_bytes)
    found.append(_versions(config, parameters))
    turned = config.gateway.turns_mb * MB if config.gateway.count else MB
    keys = _KEYS if config.gateway.count else MB
    found += [
        StreamNeed(DEAD, MB, _LETTERS, 0),
        StreamNeed(VITALS, _SIGNS, _SIGNS, 0),
        StreamNeed(LIVE_TURNS, turned, turned, 0),
    ]
    found.append(StreamNeed(SECRETS, keys, keys, 0))
    found.append(StreamNeed(HISTORY, MB, _MOMENTS, 0))
    needed = {need.stream: need for need in found}
    return {stream.name: needed.get(stream, StreamNeed(stream, MB, _UNKNOWN, 0)) for stream in streams}


def _answers(config: Config) -> int:
    """Trajectories of the evaluations of one version, of all held-out sets."""
    return sum(held_out.members for held_out in held_out_sets(config).values())


def _evaluations(config: Config) -> float:
    """Versions evaluated for each step of RL: those that are due, and the first and the last one."""
    if not held_out_sets(config):
        return 0.0
    due = 1 / config.eval.every if config.eval.every else 0.0
    return due + 2 / max(1, config.learner.steps - config.start.step)


def needs_of_the_rest(whole: dict[str, StreamNeed], progress: Progress) -> dict[str, StreamNeed]:
    """Return the final content of streams, given their current content; a run that drops more grows faster."""
    return {name: _rest(need, progress) for name, need in whole.items()}


def _rest(need: StreamNeed, progress: Progress) -> StreamNeed:
    stored = progress.stored.get(need.stream.name, 0)
    if need.stream.keep is not Retention.LEDGER or need.stream in (DEAD, HISTORY, LIVE_TURNS, SECRETS):
        return need
    step = max(need.step, math.ceil(stored / progress.trained) if progress.trained else 0)
    least = stored + _BASE + progress.left * step
    if progress.warms:
        least = max(least, need.least)  # a step of the warm-up may take more than one of RL
    return need._replace(least=least, ample=2 * least + _SPARE, step=step)


def files_bytes(config: Config, parameters: int) -> int:
    """Return the bytes of weights, checkpoints and the exported model on the disk."""
    weights = _weights_bytes(config.learner, parameters)
    columns = {column for _, column in needed_columns(config)}
    trained = _STATE[config.learner.moments]
    state = trained + _REFERENCE * ("reference" in columns) + trained * ("values" in columns)
    checkpoints = (config.learner.keep_checkpoints + 1) * parameters * state
    return checkpoints + _stored(config, weights, weights) + _engines(config.engine) * weights


def _engines(engine: EngineSettings) -> int:
    return sum(group.servers for group in engine.pools.values())


def _stored(config: Config, version: int, weights: int) -> int:
    """Bytes of the versions that are kept, one that is written, and two not removed yet; with a gate those of `live`.

    Args:
        version: bytes of a full one.
        weights: bytes of its tensors, which a difference never reaches.
    """
    keep, chain = config.learner.keep_versions, _chain(config.weights, weights)
    stored = (keep + 3) * version + chain
    if config.weights.gate_metric or config.gateway.engines:  # those that are or were live, and those under evaluation
        stored += config.weights.keep_live * (version + chain) + keep * version + chain
    if config.gateway.canary_engines:  # the canary, which may be older than all of them
        stored += version + chain
    if keep_first(config):  # the first one
        stored += version
    if config.eval.engines:  # those of open evaluations, each a difference to others
        stored += keep * (version + chain)
    return stored


def _chain(settings: WeightsSettings, weights: int) -> int:
    """Bytes of the possible bases of a version, in addition to its own."""
    return 0 if settings.delta == "never" else (settings.full_every - 1) * weights


def _weights_bytes(learner: LearnerSettings, parameters: int) -> int:
    return parameters * (4 if learner.dtype == "float32" else 2)


def _versions(config: Config, parameters: int) -> StreamNeed:
    """Weights on the NATS server."""
    if not store_kind(config.weights.store).can(StoreCapability.SERVER):
        return StreamNeed(WEIGHTS, MB, MB, 0)
    weights = math.ceil(_weights_bytes(config.learner, parameters) * _CHUNKED)
    version, live = weights + math.ceil(_TOKENIZER * _CHUNKED), config.weights.keep_live
    least = _stored(config, version, weights)
    # In addition, engines have some, and commands promote some.
    others = _engines(config.engine) * version + live * (version + _chain(config.weights, weights))
    return StreamNeed(WEIGHTS, least, least + others + _SPARE, 0)


def created_parameters(create: CreateModelSettings) -> int:
    """Parameters of a model that is made: those of `asyncrl.training.init_model`."""
    attention = 2 * (create.heads + create.kv_heads) * create.head_dim
    return create.hidden * (2 * (len(create.alphabet) + 3) + create.layers * (attention + 3 * create.ffn))


def _ledger(config: Config, stream: Stream, step: float, warm: float) -> StreamNeed:
    least = math.ceil(_BASE + config.warmup.steps * warm + (config.learner.steps - config.start.step) * step)
    spare = _BY_TIME if stream in (FLEET, ACTORS) else _SPARE
    return StreamNeed(stream, least, 2 * least + spare, math.ceil(step))


def _snapshot_bytes(config: Config) -> dict[Stream, int]:
    """Of one snapshot of each keeper, by its log."""
    groups, kept = config.buffer.batch_groups, config.learner.kept_steps
    opened, members = open_groups(groups, config.buffer.max_lag), groups * largest_group(config)
    return {
        PROMPTS: _STATE_BASE + opened * _OPEN_GROUP,
        BATCHES: _STATE_BASE + opened * largest_group(config) * _OPEN_TRAJECTORY,
        TRAINING: _STATE_BASE + kept * _KEPT_STEP,
        FLEET: _STATE_BASE + kept * (groups * _KEPT_GROUP + members * _KEPT_MEMBER),
    }


def _logged(config: Config, members: int) -> dict[Stream, float]:
    """Bytes that snapshots add to each keeper's log with every step of this many trajectories."""
    large = (_PACKED + members * _MEMBER) / _COUNTED  # a batch.packed counts as several messages
    folded = {PROMPTS: members + large, BATCHES: 2 * members + large, TRAINING: large, FLEET: large}
    every = config.supervision.snapshot_every
    return {
        stream: folded[stream] / every * (size if size <= INLINE_BYTES else _NAMED)
        for stream, size in _snapshot_bytes(config).items()
    }


def _payload(config: Config, row_bytes: float, route_bytes: int) -> tuple[StreamNeed, StreamNeed]:
    """Tokens, and the blobs of their experts and of bodies too large for one message."""
    room = payload_room(config, row_bytes)
    longest = room.batch // (config.buffer.batch_groups * largest_group(config))
    warm = config.warmup.batch_rows * (row_bytes * (_TOKEN + _TEXT) + _RESULT) if config.warmup.steps else 0.0
    room = room._replace(least=max(room.least, math.ceil((config.buffer.max_lag + 3) * warm)))
    inline = min(1.0, INLINE_BYTES / longest)  # a longer result is in the blob stream, a shorter one never is
    keeps = config.nats.keep == "run"

    def need(stream: Stream, held: Sequence[tuple[float, PayloadSize]], besides: int) -> StreamNeed:
        least = sum(share * one.least for share, one in held)
        ends = [(share, one.least + config.learner.steps * one.batch if keeps else one.full) for share, one in held]
        ample = math.ceil(max(least, sum(share * end for share, end in ends)) / CHECKPOINT_SHARE) + besides + _SPARE
        step = math.ceil(sum(share * one.batch for share, one in held)) if keeps else 0
        return StreamNeed(stream, math.ceil(least / PAUSE_SHARE) + besides, ample, 0, step)

    experts = _longest(config) * route_bytes
    # In progress there is one row for each token at most; in the result there is one again.
    goes_on = _most_new_tokens(config) > config.rollout.progress_limit
    goes_on |= any(task.rollout != "single_turn" for task in tasks_of(config).values())
    snapshots = _SNAPSHOTS * sum(size for size in _snapshot_bytes(config).values() if size > INLINE_BYTES)
    # Snapshots alone must not count as pressure, which would ask for checkpoints that make no room.
    large = [(float(inline < 1), room), (1.0, _room(config, experts * (1 + goes_on), experts))]
    blobs = need(BLOBS, large, max(MB, math.ceil(snapshots / TRIM_SHARE)))
    return need(TRAJECTORIES, [(inline, room)], 0), blobs


def _longest(config: Config) -> int:
    """Tokens of the longest trajectory: the context, if known; otherwise a prompt as long as its answer."""
    context = config.model.create.context if not config.model.path else 2 * _most_new_tokens(config)
    return config.engine.context or context


def _most_new_tokens(config: Config) -> int:
    """Of a generation of RL or of an evaluation."""
    return max(config.rollout.max_new_tokens, *(own.max_new_tokens for own in held_out_sets(config).values()), 0)
