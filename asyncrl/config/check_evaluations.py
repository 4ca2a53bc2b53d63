"""Settings of evaluations that contradict each other or others."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.check import Finding
from asyncrl.config.held_out import HeldOut, held_out_sets
from asyncrl.config.settings import Config
from asyncrl.config.tasks import tasks_of

_MOST = 65536  # members of a group


def evaluation_contradictions(config: Config) -> Iterator[Finding]:
    """Settings of evaluations that cannot hold together."""
    sets = held_out_sets(config)
    if not sets:
        yield from _none_made(config)
    for name in config.eval.sets:
        if name not in sets:
            message = f"eval.sets.{name} has no prompts: eval.prompts is 0; set eval.sets.{name}.prompts"
            yield Finding((f"eval.sets.{name}.prompts", "eval.prompts"), message)
        if config.tasks and not config.eval.sets[name].source and not config.eval.source:
            message = f"eval.sets.{name} has no source, and a run of [tasks] has no [task] whose rows it could take"
            yield Finding((f"eval.sets.{name}.source", "eval.source", "tasks"), f"{message}; set one")
        if name in config.tasks:
            message = f"{name} is the name of a task and of a held-out set, which are told apart by it; rename one"
            yield Finding((f"eval.sets.{name}", f"tasks.{name}"), message)
    for name in config.tasks if config.eval.sets else ():
        if config.tasks[name].eval_source:
            message = f"tasks.{name}.eval_source is not evaluated, since eval.sets names what is; add a set for it"
            yield Finding((f"tasks.{name}.eval_source", "eval.sets"), message)
    for held_out in sets.values():
        yield from _one_set(config, held_out)
    yield from _gate(config)
    if config.eval.engines:
        yield from _own_engines(config)


def _none_made(config: Config) -> Iterator[Finding]:
    held_out = [(task.keys("eval_source"), bool(task.eval_source)) for task in tasks_of(config).values()]
    for keys, given in ((("eval.every",), config.eval.every > 0), *held_out):
        if given:
            message = f"{keys[0]} is given, but eval.prompts = 0 evaluates nothing; raise eval.prompts or remove it"
            yield Finding((*keys, "eval.prompts"), message)


def _one_set(config: Config, held_out: HeldOut) -> Iterator[Finding]:
    prompts, samples, pass_at, tokens = map(held_out.key, ("prompts", "samples", "pass_at", "max_new_tokens"))
    if held_out.members > _MOST:
        message = f"{held_out.prompts} prompts of {held_out.samples} answers are {held_out.members} trajectories"
        yield Finding((prompts, samples), f"{message}; an evaluation has {_MOST} at most; lower one of them")
    if len(set(held_out.pass_at)) < len(held_out.pass_at):
        yield Finding((pass_at,), f"found {list(held_out.pass_at)}, expected each number once")
    above = [k for k in held_out.pass_at if k > held_out.samples]
    if above:
        message = f"pass@{above[0]} needs as many answers of a prompt, and {samples} = {held_out.samples}; raise it"
        yield Finding((pass_at, samples), message)
    if held_out.samples > 1 and held_out.temperature == 0:
        message = f"{held_out.samples} answers at temperature 0 are all alike; raise {held_out.key('temperature')}"
        yield Finding((samples, held_out.key("temperature")), message)
    context = config.engine.context or (config.model.create.context if not config.model.path else 0)
    if context and held_out.max_new_tokens >= context and held_out.max_new_tokens != config.rollout.max_new_tokens:
        message = f"{held_out.max_new_tokens} new tokens leave no room for a prompt in a context of {context}"
        yield Finding((tokens, "engine.context", "model.create.context"), f"{message}; lower them")


def _own_engines(config: Config) -> Iterator[Finding]:
    name, engine, key = config.eval.engines, config.engine, "eval.engines"
    if not held_out_sets(config):
        message = f'{key} = "{name}" serves evaluations, but eval.prompts = 0 makes none; raise it or remove {key}'
        yield Finding((key, "eval.prompts"), message)
    every, publish_every = config.eval.every, config.learner.publish_every
    if every % publish_every:
        message = f"eval.every = {every} asks for versions that are not published; set a multiple of"
        keys = ("eval.every", "learner.publish_every", key)
        yield Finding(keys, f"{message} learner.publish_every = {publish_every}")
    deadline_s, update_s = config.eval.deadline_s, engine.update_deadline_s
    if deadline_s <= update_s:
        message = (
            f"eval.deadline_s = {deadline_s:g} s is not above engine.update_deadline_s = {update_s:g} s: an evaluation "
            "would end while its engine takes the version that it waits for; raise the one or lower the other"
        )
        yield Finding(("eval.deadline_s", "engine.update_deadline_s", key), message)


def _gate(config: Config) -> Iterator[Finding]:
    weights, sets = config.weights, held_out_sets(config)
    if not weights.gate_metric:
        return
    if not sets:
        message = f'weights.gate_metric = "{weights.gate_metric}" judges evaluations, but eval.prompts = 0 makes'
        yield Finding(("weights.gate_metric", "eval.prompts"), f"{message} none; raise eval.prompts or remove it")
    elif weights.gate_set not in sets:
        named = ", ".join(filter(None, sets)) or "one without a name"
        message = f'found "{weights.gate_set}", expected the held-out set that is judged; there is {named}'
        yield Finding(("weights.gate_set", "eval.sets"), message)
    elif weights.gate_metric.startswith("pass@"):
        known = [f"pass@{k}" for k in sets[weights.gate_set].pass_at]
        if weights.gate_metric not in known:
            key = sets[weights.gate_set].key("pass_at")
            message = f'weights.gate_metric = "{weights.gate_metric}", but {key} makes {", ".join(known) or "none"}'
            yield Finding(("weights.gate_metric", key), f"{message}; add it there")
