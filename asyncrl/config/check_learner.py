"""Settings of the learner that contradict others: further models, columns, the kind of the trainer."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.addresses import is_address
from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.own_columns import RESERVED
from asyncrl.config.check import unused
from asyncrl.config.engine_settings import Capability, EngineGroup
from asyncrl.config.finding import Finding
from asyncrl.config.pools import purpose_of
from asyncrl.config.setting_types import Settings, changed_keys
from asyncrl.config.settings import Config
from asyncrl.config.staged import all_learners, as_in, key_of_learner, of_learner
from asyncrl.config.tasks import every_task
from asyncrl.config.trainers import trainer_kind, trainers_with

_WHEN = {
    "critic": 'there is a critic where an advantage is "gae"',
    "reference": "no loss and no penalty needs a reference",
    "lora": "learner.lora.rank is 0",
    "teacher": "learner.teacher.model names none",
}


def role_contradictions(config: Config) -> Iterator[Finding]:
    """Settings of the further models that cannot hold together."""
    teacher = config.learner.teacher
    filled = {"proximal", "reference", "teacher", "observed", *config.learner.columns}
    yield from _own_columns(config)
    filled |= {column for task in every_task(config) for column in ADVANTAGES[task.advantage].needs}
    for key, column in needed_columns(config):
        if column not in filled:
            message = f'needs the column "{column}", and nothing fills it; there are {", ".join(sorted(filled))}'
            yield Finding((key,), message)
        if column == "teacher" and not teacher.given:
            message = "needs the log-probs of a teacher, and there is none; set learner.teacher.model or .url"
            yield Finding((key, "learner.teacher.model"), message)
    yield from _without_effect(config)
    yield from _teacher_server(config)
    for task in every_task(config):
        keys = task.keys("advantage")
        if task.advantage == "zero" and not (teacher.given and as_in(config, task.stage).learner.teacher.coef):
            coef = key_of_learner(config.stages, task.stage, "teacher.coef")
            message = f'{keys[0]} = "zero" leaves advantages to a teacher; set learner.teacher.model, with {coef} > 0'
            yield Finding((*keys, "learner.teacher.model", coef), message)


def _own_columns(config: Config) -> Iterator[Finding]:
    """Columns of the user's own that another fills, or that no loss needs."""
    needed = {column for _, column in needed_columns(config)}
    for name in config.learner.columns:
        if name in RESERVED:
            message = f"is a column that the learner fills, as {', '.join(RESERVED)}; take another name"
            yield Finding((f"learner.columns.{name}",), message)
        elif name not in needed:
            message = "has no effect: no loss needs this column; leave it out, or name it in the needs of yours"
            yield Finding((f"learner.columns.{name}", "learner.loss"), message)


def _without_effect(config: Config) -> Iterator[Finding]:
    """Tables of models that the run has not, and steps in which nothing of the policy moves."""
    learner, needed = config.learner, {column for _, column in needed_columns(config)}
    reference = "reference" in needed
    for table, there in (
        ("critic", "values" in needed),
        ("reference", reference),
        ("lora", learner.lora.rank > 0),
        ("teacher", learner.teacher.given),
    ):
        changed = [f"learner.{table}.{key}" for key in changed_keys(getattr(learner, table))]
        given = [(name, key) for name, stage in config.stages.items() for key in of_learner(stage)]
        changed += [f"stages.{name}.{key}" for name, key in given if key.startswith(f"{table}.")]
        if changed and not there:
            yield Finding(tuple(changed), f"has no effect: {_WHEN[table]}; leave it out")
    teacher = learner.teacher
    if teacher.given:
        idle = ("kl_estimator", "kl_of") if teacher.top_k else ("direction",)
        why = "the KL over the top_k tokens is no estimate" if teacher.top_k else "learner.teacher.top_k is 0"
        yield from unused(config, "learner.teacher", "learner.teacher.top_k", why, *idle)
    assertions = learner.assertions
    if not (assertions.k3 or assertions.first_k3 or assertions.first_kl):
        why = "no bound (k3, first_k3, first_kl) is set"
        yield from unused(config, "learner.assertions", "learner.assertions.k3", why, "broken")
    if assertions.first_kl and not reference:
        yield Finding(
            ("learner.assertions.first_kl",), "has no effect: nothing is measured from a reference; leave it out"
        )
    alone = config.critic_origin + learner.critic.warmup_steps
    if "values" in needed and config.start.step < learner.steps <= alone:
        keys = ("learner.critic.warmup_steps", "learner.steps")
        yield Finding(keys, f"leaves none of {learner.steps} steps to the policy; lower it")


def adapter_contradictions(config: Config) -> Iterator[Finding]:
    """Ways of versions that adapters do not take, and servers that do not add them."""
    published = config.learner.lora.rank and config.learner.lora.publish == "adapter"
    for table, group in config.engine.tables.items():
        why = _not_served(config, group) if published else "no adapters are published"
        if group.adapters == "served" and why:
            yield Finding((f"{table}.adapters", "learner.lora.publish"), f'found "served": {why}; set "merged"')
    if not published:
        return
    for key, found, why in (
        ("weights.delta", config.weights.delta, "adapters are published whole, as small as a difference"),
        ("weights.transport", config.weights.transport, "adapters go only through the store"),
    ):
        if found != "never":
            message = f'found "{found}": {why}; set "never", or learner.lora.publish = "merged"'
            yield Finding((key, "learner.lora.publish"), message)


def _not_served(config: Config, group: EngineGroup) -> str:
    """Return why servers of a group cannot add adapters at each token; empty if they can."""
    routed = [one for name, one in config.engine.pools.items() if purpose_of(config, name) == "training"]
    found = {
        f'servers of kind "{group.kind}" do not': not group.can(Capability.ADAPTERS),
        'with weights.update = "in_place" requests would continue with the adapter before': (
            config.weights.update == "in_place"
        ),
        'a router sends requests to groups with adapters = "merged", too, which cannot take the name of an adapter': (
            bool(config.engine.router.count) and group in routed and any(one.adapters != "served" for one in routed)
        ),
        'servers that leave the GPU (placement.colocate = "time_slice") would lose the model': (
            config.placement.colocate == "time_slice"
        ),
        'adapters are not staged (staged = "always")': group.staged == "always",
    }
    problem = group.of_kind.adapter_problem(group, config.learner.lora.targets)
    return problem or next((why for why, holds in found.items() if holds), "")


def _teacher_server(config: Config) -> Iterator[Finding]:
    teacher = config.learner.teacher
    if not teacher.url:
        own = ("api_key_file", "in_flight", "timeout_s", "deadline_s")
        if teacher.model:
            yield from unused(config, "learner.teacher", "learner.teacher.url", "learner.teacher.url names none", *own)
        return
    if teacher.model:
        message = f'"{teacher.model}" and the server {teacher.url} are two teachers; leave one out'
        yield Finding(("learner.teacher.model", "learner.teacher.url"), message)
    if not is_address(teacher.url, "http", "https"):
        yield Finding(("learner.teacher.url",), f'found "{teacher.url}", expected http://host:port')
    if teacher.timeout_s > teacher.deadline_s:
        message = f"one answer may take {teacher.timeout_s:g} s, and all together {teacher.deadline_s:g} s; raise it"
        yield Finding(("learner.teacher.deadline_s", "learner.teacher.timeout_s"), message)
    for task in every_task(config):
        if task.temperature != 1.0:
            keys = task.keys("temperature")
            message = (
                f"found {task.temperature:g}: servers give log-probs of a prompt at temperature 1; set {keys[0]} = 1"
            )
            yield Finding((*keys, "learner.teacher.url"), message)


def needed_columns(config: Config) -> Iterator[tuple[str, str]]:
    """Columns that losses, advantages and penalties of RL need in any stage, each with the setting that needs it."""
    for stage, learner in all_learners(config).items():
        loss = LOSSES[learner.loss]
        options = {name: value for name, value in learner.loss_options.items() if name in loss.__struct_fields__}
        chosen = loss(**options)
        for column in [name for name in chosen.needs if name not in chosen.of_batch]:
            yield key_of_learner(config.stages, stage, "loss"), column
        if learner.reference.kl_coef:
            yield key_of_learner(config.stages, stage, "reference.kl_coef"), "reference"
    if config.live.method != "binary":
        yield "live.method", "reference"
    if config.live.fraction and config.live.safety.kl_bound:
        yield "live.safety.kl_bound", "reference"
    for task in every_task(config):
        for column in ADVANTAGES[task.advantage].needs:
            yield task.keys("advantage")[0], column


def has_critic(config: Config) -> bool:
    """Return whether an advantage of any task or stage needs a critic."""
    return any(column == "values" for _, column in needed_columns(config))


def trainer_contradictions(config: Config) -> Iterator[Finding]:
    """Settings that trainers of this kind do not have, or that contradict others with them."""
    learner, kind = config.learner, trainer_kind(config.learner.trainer)
    changed = [("fp8", ["dtype"])] if learner.dtype == "fp8" else []
    for key in changed_keys(learner):
        table = getattr(learner, key)
        keys = [f"{key}.{one}" for one in changed_keys(table)] if isinstance(table, Settings) else [key]
        changed.append((key, keys))
    for one, keys in changed:
        if one not in kind.capabilities | kind.settings and (others := trainers_with(one)):
            message = f'the trainer "{learner.trainer}" has no {one}; leave it out, or set learner.trainer = {others}'
            yield Finding((*(f"learner.{key}" for key in keys), "learner.trainer"), message)
    yield from kind.checks(learner)
