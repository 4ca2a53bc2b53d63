"""Settings that are invalid or contradict each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter, itemgetter

from asyncrl.addresses import is_address
from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.config.engine_settings import Capability, EngineGroup, EngineKind, EngineSettings, kinds_with
from asyncrl.config.finding import Finding
from asyncrl.config.held_out import graded_tasks, held_out_sets
from asyncrl.config.process_settings import NatsSettings, SupervisionSettings
from asyncrl.config.setting_types import changed_keys
from asyncrl.config.settings import (
    Config,
    LearnerSettings,
    ModelSettings,
    RolloutSettings,
    WarmupSettings,
    WorkerSettings,
)
from asyncrl.config.slots import slots_for
from asyncrl.config.staged import as_in, key_of_learner
from asyncrl.config.tasks import Task, every_task
from asyncrl.config.worker_pools import check_pools, reward_tables
from asyncrl.data.procedural import RULES
from asyncrl.environment_names import KINDS, ROLLOUT, EnvironmentCapability, environment_can, is_environment
from asyncrl.ports import is_ip
from asyncrl.rewards.kinds import reward_of
from topics.roles import ROLE_NAMES

_ROUNDED = 0.99  # decay whose change of a moment, 1 %, is above half a unit of bfloat16's last place
LEAST_LEASE_S = 0.5  # a process is silent for as long now and then


def not_a_function(key: str, spec: str) -> Iterator[Finding]:
    """Find a setting that names no function of the user's."""
    if ":" not in spec:
        yield Finding((key,), f'found "{spec}", expected path/to/file.py:function or package.module:function')


def unused(config: Config, table: str, switch: str, why: str, *only: str) -> Iterator[Finding]:
    """Find settings of a table that are given and have no effect.

    Args:
        table: dotted.
        switch: the setting that makes it so.
        only: the keys of the table that are looked at; without any, all.
    """
    given = [f"{table}.{key}" for key in changed_keys(attrgetter(table)(config)) if not only or key in only]
    if given:
        yield Finding((*given, switch), f"has no effect: {why}; leave it out")


def contradictions(config: Config) -> list[Finding]:
    """Settings that are each in range and cannot hold together."""
    return [
        *_only(config),
        *_nats(config.nats),
        *_model(config.model),
        *_lengths(config),
        *_sampling(config.rollout),
        *check_pools(config),
        *dict.fromkeys(found for task in every_task(config) for found in _groups_of(config, task)),
        *_warmup(config.warmup),
        *_leases(config.workers, config.supervision),
        *_limits(config),
        *_lag(config),
        *_learner(config.learner),
        *_start(config),
        *_engine(config.engine),
        *_router(config.engine),
        *_seeded(config),
        *_tasks(config),
    ]


def _only(config: Config) -> Iterator[Finding]:
    unknown = [name for name in config.only if name not in ROLE_NAMES]
    if unknown and not config.actors:  # which may have their own roles
        yield Finding(("only",), f"found {_quoted(unknown)}, expected roles: {', '.join(ROLE_NAMES)}")


def _nats(nats: NatsSettings) -> Iterator[Finding]:
    if "@" in nats.url:
        message = "the URL holds credentials, and configs are copied and shown; use nats.user and nats.password_file"
        yield Finding(("nats.url",), message)
    elif nats.url and not all(is_address(url, "nats", "tls") for url in nats.url.split(",")):
        yield Finding(("nats.url",), f'found "{nats.url}", expected nats://host:port or tls://host:port')
    for one, other in (("user", "password_file"), ("tls_cert", "tls_key")):
        if bool(getattr(nats, one)) != bool(getattr(nats, other)):
            given, missing = (one, other) if getattr(nats, one) else (other, one)
            message = f"nats.{given} is given without nats.{missing}; set both or neither"
            yield Finding((f"nats.{given}", f"nats.{missing}"), message)
    for key in [key for key in ("domain", "tags") if getattr(nats, key) and not nats.url]:
        message = f"nats.{key} is for servers at nats.url; the server that a run starts here has none"
        yield Finding((f"nats.{key}", "nats.url"), message)
    if nats.replicas > 1 and not nats.url:
        message = f"nats.replicas = {nats.replicas} is for a cluster at nats.url; nats.servers = 3 starts one here"
        yield Finding(("nats.replicas", "nats.url"), message)
    yield from _listening(nats)
    logins = [key for key in ("user", "nkey_file", "credentials") if getattr(nats, key)]
    if len(logins) > 1:
        keys = tuple(f"nats.{key}" for key in logins)
        yield Finding(keys, f"{' and '.join(keys)} each give the login; set one of them")
    for key in (*logins, *(key for key in ("tls_ca", "tls_cert") if getattr(nats, key))):
        if not nats.url:
            message = f"nats.{key} is given without nats.url; a server started here has its own"
            yield Finding((f"nats.{key}", "nats.url"), message)
    if nats.url and nats.tls_ca and not nats.url.startswith("tls://"):
        message = f'nats.tls_ca is given, but nats.url = "{nats.url}" does not insist on TLS; write tls://'
        yield Finding(("nats.tls_ca", "nats.url"), message)


def _listening(nats: NatsSettings) -> Iterator[Finding]:
    for key in changed_keys(nats):
        if nats.url and key in ("host", "port"):
            message = f"nats.{key} is for a server started here, but nats.url names one that runs; remove one of them"
            yield Finding((f"nats.{key}", "nats.url"), message)
    if not is_ip(nats.host):
        message = f'found "{nats.host}", expected an IP address of this machine, such as 127.0.0.1, or 0.0.0.0 for all'
        yield Finding(("nats.host",), message)
    if nats.port + nats.servers - 1 > 65535:
        message = f"three servers would listen on {nats.port} to {nats.port + 2}, and ports end at 65535; lower it"
        yield Finding(("nats.port", "nats.servers"), message)


def _model(model: ModelSettings) -> Iterator[Finding]:
    if model.path:
        return
    create = model.create
    if create.heads % create.kv_heads:
        message = f"{create.kv_heads} key-value heads do not divide {create.heads} heads; set kv_heads to a divisor"
        yield Finding(("model.create.kv_heads", "model.create.heads"), message)
    if create.head_dim % 2:
        message = f"found {create.head_dim}, expected an even number: rotary positions turn pairs"
        yield Finding(("model.create.head_dim",), message)
    if not create.alphabet:
        yield Finding(("model.create.alphabet",), "found an empty alphabet, expected the characters of the task")
    repeated = "".join(sorted(letter for letter, count in Counter(create.alphabet).items() if count > 1))
    if repeated:
        yield Finding(("model.create.alphabet",), f'"{repeated}" found more than once, expected each character once')


def _lengths(config: Config) -> Iterator[Finding]:
    tokens = config.rollout.max_new_tokens if config.rolls_out else 0
    context, served = config.model.create.context, config.engine.context
    if not config.model.path and tokens >= context:
        message = f"{tokens} new tokens leave no room for a prompt in model.create.context = {context}"
        yield Finding(("rollout.max_new_tokens", "model.create.context"), f"{message}; lower them or raise the context")
    if served and tokens >= served:
        message = f"{tokens} new tokens leave no room for a prompt in engine.context = {served}; lower them or raise"
        yield Finding(("rollout.max_new_tokens", "engine.context"), f"{message} engine.context")
    if not config.model.path and served > context:
        message = f"engine.context = {served} exceeds model.create.context = {context}; lower it, or 0: the model's"
        yield Finding(("engine.context", "model.create.context"), message)


def _sampling(rollout: RolloutSettings) -> Iterator[Finding]:
    if rollout.top_k == 0:
        yield Finding(("rollout.top_k",), "found 0, expected -1 (all tokens) or at least 1")
    if "" in rollout.stop:
        yield Finding(("rollout.stop",), 'holds the empty string "", which ends every generation at once; remove it')
    repeated = [text for text, count in Counter(rollout.stop).items() if count > 1]
    if repeated:
        yield Finding(("rollout.stop",), f"{_quoted(repeated)} found more than once, expected each string once")


def _groups_of(config: Config, task: Task) -> Iterator[Finding]:
    size, learner, rollout = task.group_size, as_in(config, task.stage).learner, config.rollout
    sizes, advantages, temperatures = (task.keys(field) for field in ("group_size", "advantage", "temperature"))
    compared = ADVANTAGES[task.advantage].compares
    if size == 1 and compared:
        message = (
            f'{advantages[0]} = "{task.advantage}" compares the members of a group, but {sizes[0]} = 1; '
            f'raise it to 2 or more, or set {advantages[0]} = "none"'
        )
        yield Finding((*sizes, *advantages), message)
    table, slots = slots_for(config, task.name)
    if size > slots:
        message = (
            f"a group of {size} is larger than all open trajectories: {table}.workers * {table}.slots = {slots}; "
            "make the group smaller, or give the workers more slots"
        )
        yield Finding((*sizes, f"{table}.slots", f"{table}.workers"), message)
    if size == 1 and "zero_variance" in learner.filters:
        message = f"a group of {sizes[0]} = 1 has no variance, and zero_variance never drops it; remove it"
        yield Finding((key_of_learner(config.stages, task.stage, "filters"), *sizes), message)
    if task.temperature == 0 and learner.steps:
        message = (
            "found 0: a greedy policy gives each of its tokens the probability 1, so that no advantage has a gradient; "
            "set it above 0 (evaluations have eval.temperature)"
        )
        yield Finding((*temperatures, *sizes, *advantages), message)
    elif (
        rollout.top_k == 1
        and size > 1
        and compared
        and any(group.can(Capability.MODEL) for group in config.engine.pools.values())
    ):
        message = "found 1, which samples the same trajectory for each member of a group: no advantage left; raise it"
        yield Finding(("rollout.top_k", *sizes, *advantages), message)


def _warmup(warmup: WarmupSettings) -> Iterator[Finding]:
    rows, batch = warmup.rows_per_trajectory, warmup.batch_rows
    if batch % rows:
        message = f"{rows} rows do not divide warmup.batch_rows = {batch}; a batch is made of whole trajectories"
        yield Finding(("warmup.rows_per_trajectory", "warmup.batch_rows"), message)


def _leases(workers: WorkerSettings, supervision: SupervisionSettings) -> Iterator[Finding]:
    for key, lease_s in (("workers.lease_s", workers.lease_s), ("supervision.silence_s", supervision.silence_s)):
        if lease_s < LEAST_LEASE_S:
            message = f"found {lease_s:g} s, expected at least {LEAST_LEASE_S:g} s: an actor busy for so long is killed"
            yield Finding((key,), message)
    if workers.lease_s >= workers.stall_s:
        message = (
            f"workers.lease_s = {workers.lease_s:g} s is not below workers.stall_s = {workers.stall_s:g} s; lower it: "
            "a lease is renewed several times before a worker counts as stalled"
        )
        yield Finding(("workers.lease_s", "workers.stall_s"), message)


def _limits(config: Config) -> Iterator[Finding]:
    limits = []
    tasks = graded_tasks(config).values()
    if any((reward := reward_of(task.reward)) and not reward.compares for task in tasks):
        own = {key: table.time_limit_s for key, table in reward_tables(config).items()}
        limits += [(f"{key}.time_limit_s", limit_s, "reward") for key, limit_s in own.items()]
    if any(task.tournament for task in tasks):
        limits.append(("reward.tournament_limit_s", config.reward.tournament_limit_s, "tournament"))
    if any(task.rollout != "single_turn" for task in tasks):  # it has no tools
        limits.append(("rollout.tool_limit_s", config.rollout.tool_limit_s, "tool"))
    deadlines = [("buffer.group_deadline_s", config.buffer.group_deadline_s, "a group")]
    if held_out_sets(config):
        deadlines.append(("eval.deadline_s", config.eval.deadline_s, "an evaluation"))
    deadline, deadline_s, which = min(deadlines, key=itemgetter(1))
    for key, limit_s, what in limits:
        if limit_s >= deadline_s:
            message = (
                f"{key} = {limit_s:g} s is not below {deadline} = {deadline_s:g} s: {which} would end "
                f"while a {what} is within its limit; lower the one or raise the other"
            )
            yield Finding((key, deadline), message)


def _lag(config: Config) -> Iterator[Finding]:
    lag, learner = config.buffer.max_lag, config.learner
    if config.buffer.max_batches_ahead > lag:
        ahead = config.buffer.max_batches_ahead
        message = (
            f"buffer.max_batches_ahead = {ahead} packs a batch that has lag, but buffer.max_lag = {lag}; set ahead to 0"
        )
        yield Finding(("buffer.max_batches_ahead", "buffer.max_lag"), message)
    if not config.trains:
        return
    if learner.publish_every > lag + 1:
        message = (
            f"learner.publish_every = {learner.publish_every}, expected at most buffer.max_lag + 1 = {lag + 1}: "
            "no published version would be fresh enough to train on, and no step would be trained"
        )
        yield Finding(("learner.publish_every", "buffer.max_lag"), message)
    if learner.keep_versions < lag + 2:
        message = (
            f"learner.keep_versions = {learner.keep_versions}, expected at least buffer.max_lag + 2 = {lag + 2}: "
            "weights that may still be sampled from would be deleted"
        )
        yield Finding(("learner.keep_versions", "buffer.max_lag"), message)


def _learner(learner: LearnerSettings) -> Iterator[Finding]:
    for key, betas in (("learner.betas", learner.betas), ("learner.critic.betas", learner.critic.betas)):
        if 1.0 in betas:
            yield Finding((key,), f"found {list(betas)}, expected two numbers below 1")
        elif learner.moments == "bfloat16" and max(betas) > _ROUNDED:
            message = f'found {list(betas)}, expected at most {_ROUNDED} with learner.moments = "bfloat16"'
            yield Finding((key, "learner.moments"), f"{message}, which rounds smaller changes away")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", learner.device):
        yield Finding(("learner.device",), f'found "{learner.device}", expected cpu, cuda or cuda:N')
    if learner.elastic_s and learner.ranks == 1:
        message = "lets a learner continue with fewer ranks, found learner.ranks = 1; raise it, or set 0"
        yield Finding(("learner.elastic_s", "learner.ranks"), message)
    if learner.ranks > 1 and ":" in learner.device:
        yield Finding(("learner.device", "learner.ranks"), 'names one GPU for several ranks; set "cuda"')


def _start(config: Config) -> Iterator[Finding]:
    start = config.start
    if start.critic > start.step:
        message = f"found {start.critic}, expected at most start.step = {start.step}, the step of its checkpoint"
        yield Finding(("start.critic", "start.step"), message)
    if not start.checkpoint:
        for key, given in (("start.step", start.step), ("start.prompt", start.prompt)):
            if given:
                message = f"{key} = {given} without start.checkpoint: an untrained model begins at 0; name a checkpoint"
                yield Finding((key, "start.checkpoint"), message)
        return
    if start.trained and config.learner.lora.rank and config.learner.lora.publish == "adapter":
        message = "the weights below the adapters were trained, and engines would add the adapter to those of the model"
        advice = 'set "merged", or begin a run with the model that was exported (model.path)'
        yield Finding(("learner.lora.publish", "start.trained"), f'found "adapter": {message}; {advice}')
    if config.warmup.steps:
        message = f"warmup.steps = {config.warmup.steps}, but the warm-up of start.checkpoint is done; set 0"
        yield Finding(("warmup.steps", "start.checkpoint"), message)
    if config.learner.steps <= start.step:
        message = f"learner.steps = {config.learner.steps} leaves nothing to train after start.step = {start.step}"
        yield Finding(("learner.steps", "start.step"), f"{message}; raise learner.steps")


def _engine(engine: EngineSettings) -> Iterator[Finding]:
    for key in changed_keys(engine) if engine.groups else ():
        if key in EngineGroup.__struct_fields__:
            names = ", ".join(engine.groups)
            message = f"is for one group of engines, but engine.groups has {names}; move it into [engine.groups.NAME]"
            yield Finding((f"engine.{key}", "engine.groups"), message)
    for table, group in engine.tables.items():
        yield from _engine_group(table, group)
    if len({group.can(Capability.MODEL) for group in engine.tables.values()}) > 1:
        message = "scripted engines make tokens up, and cannot be mixed with servers of a model"
        yield Finding(tuple(f"{table}.kind" for table in engine.tables), message)


def _router(engine: EngineSettings) -> Iterator[Finding]:
    if engine.router.count and any(group.of_kind.client != EngineKind.client for group in engine.pools.values()):
        message = "a router needs servers with SGLang's API, which scripted engines and vLLM do not have; set 0"
        yield Finding(("engine.router.count",), message)
    if any(argument.split("=")[0] == "--api-key" for argument in engine.router.arguments):
        message = "holds --api-key, which the run itself gives a router; remove it"
        yield Finding(("engine.router.arguments",), message)
    roles = {group.role for group in engine.pools.values()}
    if roles != {"regular"} and (roles != {"prefill", "decode"} or not engine.router.count):
        found = ", ".join(sorted(roles))
        message = f"--disaggregation-mode makes servers that are {found}; expected groups of both prefill and decode "
        keys = tuple(f"{table}.arguments" for table in engine.tables)
        yield Finding((*keys, "engine.router.count"), message + "and no others, with engine.router.count = 1")


def _engine_group(table: str, group: EngineGroup) -> Iterator[Finding]:
    elsewhere = group.can(Capability.ADDRESSES)
    if group.addresses and not elsewhere:
        kinds = _quoted(kinds_with(Capability.ADDRESSES))
        message = f'{table}.addresses is for kind = {kinds}, found "{group.kind}"; remove them or set it'
        yield Finding((f"{table}.addresses", f"{table}.kind"), message)
    for key, given in (("arguments", group.arguments), ("gpus", group.gpus)):
        if given and elsewhere:
            message = f'{table}.{key} is for servers started here, found kind = "{group.kind}"; remove them'
            yield Finding((f"{table}.{key}", f"{table}.kind"), message)
    if len(group.gpus) % group.count or len(set(group.gpus)) < len(group.gpus):
        message = f"found {group.gpus}, expected different numbers, as many for each of {table}.count = {group.count}"
        yield Finding((f"{table}.gpus", f"{table}.count"), message)
    for option, instead in (("--api-key", f"{table}.api_key_file"), ("--config", f"options in {table}.arguments")):
        if any(argument.split("=")[0] == option for argument in group.arguments):
            message = f"holds {option}, which a server started here is given by the run; use {instead}"
            yield Finding((f"{table}.arguments",), message)


def _seeded(config: Config) -> Iterator[Finding]:
    for table, group in config.engine.tables.items():
        if config.rollout.seeded and (switch := group.missing_switch(Capability.SEEDS)):
            message = f"{group.of_kind.title} takes no seeds of requests without {switch}; add it to {table}.arguments"
            yield Finding((f"{table}.arguments", "rollout.seeded"), message)


def _tasks(config: Config) -> Iterator[Finding]:
    given = [f"task.{key}" for key in changed_keys(config.task) if key in ("source", "options", "epochs")]
    for key in [*given, *(["eval.source"] if config.eval.source and not config.eval.sets else [])]:
        if config.tasks:
            message = f"{key} is for a run of one task, and [tasks] names {', '.join(config.tasks)}; remove one of them"
            yield Finding((key, "tasks"), message)
    for name, settings in config.tasks.items():
        if settings.source is None:
            yield Finding((f"tasks.{name}", f"tasks.{name}.source"), f"names no data; set tasks.{name}.source")
    for task in graded_tasks(config).values():
        yield from _task(task)


def _task(task: Task) -> Iterator[Finding]:
    rewards, sources, rollouts = (task.keys(field) for field in ("reward", "source", "rollout"))
    if task.reward in KINDS and task.source in RULES:
        message = f'{rewards[0]} = "{task.reward}" cannot grade {sources[0]} = "{task.source}"; set "exact"'
        yield Finding((*rewards, *sources), message)
    plays = (EnvironmentCapability.EPISODE, EnvironmentCapability.PROGRAM)
    without = is_environment(task.source) and not any(environment_can(task.source, one) for one in plays)
    if task.rollout == ROLLOUT and (without or task.source in RULES):
        message = f'{rollouts[0]} = "{ROLLOUT}" needs rows of an environment with episodes; {sources[0]} has none'
        yield Finding((*rollouts, *sources), message)
    if not task.reward and task.rollout == "single_turn":
        message = f'{rewards[0]} = "" names no reward and {rollouts[0]} = "single_turn" gives none; set one of them'
        yield Finding((*rewards, *rollouts), message)


def _quoted(texts: list[str]) -> str:
    return ", ".join(f'"{text}"' for text in texts)
