"""Settings of live traffic that contradict others."""

from __future__ import annotations

import re
from collections.abc import Iterator

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.hindsight import HINDSIGHT
from asyncrl.config.check import not_a_function, unused
from asyncrl.config.finding import Finding
from asyncrl.config.live_settings import JUDGES, judge_kind
from asyncrl.config.setting_types import changed_keys
from asyncrl.config.settings import Config
from asyncrl.config.tasks import every_task
from asyncrl.config.trainers import TrainerCapability, trainer_kind, trainers_with


def live_contradictions(config: Config) -> Iterator[Finding]:
    """Contradictions in the settings of gateway, judges, and live training."""
    if config.live.fraction and not config.gateway.count:
        message = (
            f"live.fraction = {config.live.fraction:g}, but there is no gateway whose turns could be trained; "
            "set gateway.count to 1, or live.fraction to 0"
        )
        yield Finding(("live.fraction", "gateway.count"), message)
    yield from _of_judges(config)
    yield from _of_redaction(config)
    yield from _of_hints(config)
    try:
        re.compile(config.live.safety.question)
    except re.error as error:
        message = f'found "{config.live.safety.question}", expected a regular expression: {error}'
        yield Finding(("live.safety.question",), message)
    measured = config.live.fraction and trainer_kind(config.learner.trainer).can(TrainerCapability.LIVE)
    if config.live.safety.kl_bound and not measured:
        trainers = trainers_with(TrainerCapability.LIVE)
        message = f"has no effect: it is measured with live.fraction above 0 and learner.trainer = {trainers}; "
        message += "leave it out"
        yield Finding(("live.safety.kl_bound",), message)
    for task in every_task(config):
        if HINDSIGHT in ADVANTAGES[task.advantage].needs:
            message = f'"{task.advantage}" is of live turns, whose judges give hints; set live.method'
            yield Finding((*task.keys("advantage"), "live.method"), message)


def _of_hints(config: Config) -> Iterator[Finding]:
    live, hindsight, learner = config.live, config.live.hindsight, config.learner
    changed = changed_keys(hindsight)
    if live.method == "binary" or not (live.fraction and config.gateway.count and live.judge.kind):
        why = 'live.method is "binary"' if live.method == "binary" else "no judge looks at turns that are trained"
        # The wording belongs to what the model was taught; a config may keep it while it tries methods.
        keys = [f"live.hindsight.{key}" for key in changed if key != "wording"]
        keys += ["live.method"] * (live.method != "binary")
        if keys:
            yield Finding(tuple(keys), f"has no effect: {why}; leave it out")
        return
    if problem := judge_kind(live.judge.kind).hint_problem(live.judge):
        message = f'"{live.method}" learns from hints, and {problem}'
        yield Finding(("live.method", "live.judge.function"), message)
    if live.method == "distillation" and "w_rl" in changed:
        message = 'has no effect: live.method = "distillation" has no rewards; leave it out, or take "combine"'
        yield Finding(("live.hindsight.w_rl", "live.method"), message)
    if "{hint}" not in hindsight.wording:
        yield Finding(("live.hindsight.wording",), f"found {hindsight.wording!r}, expected a text with {{hint}}")
    if not trainer_kind(learner.trainer).can(TrainerCapability.LIVE):
        message = f"learns from hints only with learner.trainer = {trainers_with(TrainerCapability.LIVE)}; change one"
        yield Finding(("live.method", "learner.trainer"), message)
    if learner.reference.refresh_every:
        message = (
            "lets the teacher of the hints follow the policy, which collapses when it learns from itself; leave it out"
        )
        yield Finding(("learner.reference.refresh_every", "live.method"), message)
    if hindsight.top_k and learner.teacher.given and learner.teacher.top_k:
        message = "two losses over the tokens of a place; set one of them to 0"
        yield Finding(("live.hindsight.top_k", "learner.teacher.top_k"), message)


def _of_redaction(config: Config) -> Iterator[Finding]:
    live = config.live
    if not (config.gateway.count and live.redact):
        why = "there is no gateway (gateway.count)" if live.redact else "live.redact names no function"
        yield from unused(config, "live", "gateway.count" if live.redact else "live.redact", why, "redact", "redact_s")
    else:
        yield from not_a_function("live.redact", live.redact)


def _of_judges(config: Config) -> Iterator[Finding]:
    judge = config.live.judge
    if not (config.gateway.count and judge.kind):
        why = "there is no gateway (gateway.count)" if judge.kind else "live.judge.kind names no judge"
        yield from unused(config, "live.judge", "gateway.count" if judge.kind else "live.judge.kind", why)
        return
    keys_of = {name: judge_kind(name).keys for name in JUDGES}
    for key in changed_keys(judge):
        owners = [name for name, keys in keys_of.items() if key in keys]
        if owners and judge.kind not in owners:
            message = f'is of live.judge.kind = "{" or ".join(owners)}", found "{judge.kind}"; leave it out'
            yield Finding((f"live.judge.{key}", "live.judge.kind"), message)
    yield from judge_kind(judge.kind).checks(judge)
