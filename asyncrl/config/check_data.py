"""Settings of rows, groups, stages, rewards and evaluations that contradict others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from asyncrl.config.check import unused
from asyncrl.config.finding import Finding
from asyncrl.config.held_out import HeldOut, graded_tasks, held_out_sets
from asyncrl.config.setting_types import changed_keys
from asyncrl.config.settings import Config
from asyncrl.config.staged import all_filters, as_in, key_of_learner
from asyncrl.config.tasks import Task, every_task, stage_tasks, tasks_of
from asyncrl.rewards.kinds import is_judged, reward_of
from topics.prompts import ONLY_TASK


def data_contradictions(config: Config) -> Iterator[Finding]:
    """Contradictions in the settings of training data."""
    yield from _filters(config)
    yield from _overlong(config)
    yield from _scope(config)
    yield from _late(config)
    yield from _timeout_reward(config)
    yield from _judge_engines(config)
    yield from _without_learner(config)
    if not config.warmup.source:
        yield from unused(config, "warmup", "warmup.source", "warmup.source names no data", "options")
    if config.learner.turn_discount != 1.0 and all(task.advantage != "turns" for task in every_task(config)):
        message = 'has no effect: no advantage is "turns"; leave it out'
        yield Finding(("learner.turn_discount", "learner.advantage"), message)
    if bool(config.learner.reward_weights) != any(task.advantage == "gdpo" for task in every_task(config)):
        message = 'is empty, and the advantage "gdpo" needs the metrics of your reward; set such as {correct = 1.0}'
        if config.learner.reward_weights:
            message = 'has no effect: no advantage is "gdpo"; leave it out'
        yield Finding(("learner.reward_weights", "learner.advantage"), message)
    if config.task.max_prompt_tokens and not config.model.path:
        message = "counts tokens of the model in model.path, and the run makes a model; leave it out, or name a model"
        yield Finding(("task.max_prompt_tokens", "model.path"), message)
    yield from _stages(config)
    for task in tasks_of(config).values():
        table = "task.curriculum" if task.name == ONLY_TASK else f"tasks.{task.name}.curriculum"
        yield from _curriculum(task, table)
    yield from _mastered(config)
    if config.tasks and changed_keys(config.task.curriculum):
        message = "is for a run of one task, and [tasks] names several; set it in [tasks.NAME.curriculum]"
        yield Finding(("task.curriculum.option", "tasks"), message)


def _mastered(config: Config) -> Iterator[Finding]:
    rule, others = config.task.mastered, {"tasks": config.tasks, "stages": config.stages}
    if not rule.groups:
        yield from unused(config, "task.mastered", "task.mastered.groups", "task.mastered.groups is 0")
        return
    others["task.curriculum.option"] = {"": config.task.curriculum.option} if config.task.curriculum.option else {}
    for key, given in others.items():
        if given:
            message = f"rows leave the order of one task alone, and {key} is set; remove one of them"
            yield Finding(("task.mastered.groups", key), message)


def _stages(config: Config) -> Iterator[Finding]:
    for name, stage in config.stages.items():
        table = f"stages.{name}.shares"
        for unknown in sorted(stage.shares.keys() - config.tasks.keys()):
            known = f"[tasks] names {', '.join(config.tasks)}" if config.tasks else "no [tasks.NAME] names any"
            yield Finding((f"{table}.{unknown}", table, "tasks"), f"is no task: {known}")
        if not any(task.share for task in stage_tasks(config, name).values()):
            yield Finding((table,), "leaves no task a share; give one of them 1 or more")
        yield from _condition(config, name)
    steps = [(name, stage.at_step) for name, stage in config.stages.items() if stage.at_step]
    for (before, earlier), (name, step) in pairwise(steps):
        if step <= earlier:
            order = f"stages begin in the order of their tables, and stage {before} before it at batch {earlier}"
            yield Finding((f"stages.{name}.at_step",), f"found {step}, but {order}; exchange the two")
    for name in sorted(set(config.start.stages.values()) - config.stages.keys()):
        message = f"the run is forked after its stage {name}; keep [stages.{name}], whose shares its prompts follow"
        yield Finding(("start.stages", "stages"), message)


def _condition(config: Config, name: str) -> Iterator[Finding]:
    """The condition under which a stage begins by itself."""
    stage, key = config.stages[name], f"stages.{name}"
    if stage.at_step and stage.at_accuracy is not None:
        message = "the stage would begin by two conditions; set one of them, or leave both to two stages"
        yield Finding((f"{key}.at_step", f"{key}.at_accuracy"), message)
    if stage.at_step >= config.learner.steps > 0:
        message = (
            f"{key}.at_step = {stage.at_step} is not before the last batch, learner.steps = {config.learner.steps}; "
            "lower the one or raise the other"
        )
        yield Finding((f"{key}.at_step", "learner.steps"), message)
    if stage.at_accuracy is None and "accuracy_groups" in changed_keys(stage):
        yield Finding((f"{key}.accuracy_groups", f"{key}.at_accuracy"), "has no effect without at_accuracy; set it")


def _curriculum(task: Task, table: str) -> Iterator[Finding]:
    rule = task.curriculum
    if not rule.option:
        if changed := changed_keys(rule):
            message = "is of a difficulty that does not rise; name the option of the source in option"
            yield Finding((*(f"{table}.{key}" for key in changed), f"{table}.option"), message)
        return
    if rule.last <= rule.first:
        message = f"found {rule.first} to {rule.last}, expected a last value above the first one"
        yield Finding((f"{table}.last", f"{table}.first", f"{table}.option"), message)
    elif rule.option in task.options:
        message = f'the option "{rule.option}" is the difficulty, which {table} sets; remove it from the options'
        yield Finding((*task.keys("options"), f"{table}.option"), message)


def _filters(config: Config) -> Iterator[Finding]:
    learner, table, used = config.learner, "learner.filter_options", all_filters(config)
    for name in learner.filter_options.__struct_fields__:
        if name not in used:
            yield from unused(config, f"{table}.{name}", "learner.filters", f'learner.filters has no "{name}"')
    rate, length = learner.filter_options.pass_rate, learner.filter_options.length
    if rate.above >= rate.below:
        message = f"found above {rate.above:g} and below {rate.below:g}: no share of members is between them; widen it"
        yield Finding((f"{table}.pass_rate.above", f"{table}.pass_rate.below"), message)
    if 0 < length.most_tokens < length.least_tokens:
        message = f"found at most {length.most_tokens} tokens, and at least {length.least_tokens}; exchange them"
        yield Finding((f"{table}.length.most_tokens", f"{table}.length.least_tokens"), message)
    for task in every_task(config):
        filters = as_in(config, task.stage).learner.filters
        if task.group_size == 1 and "pass_rate" in filters and (rate.above, rate.below) == (0.0, 1.0):
            sizes = task.keys("group_size")
            message = f"a group of {sizes[0]} = 1 passes or does not: pass_rate would drop all; remove it"
            yield Finding((key_of_learner(config.stages, task.stage, "filters"), *sizes), message)


def _scope(config: Config) -> Iterator[Finding]:
    """Rewards of whole groups: functions that take lists, each of whose groups is complete once."""
    for task in graded_tasks(config).values():
        if task.tournament:
            yield from _tournament(config, task)
        if task.reward_scope != "group":
            continue
        scopes, rewards = task.keys("reward_scope"), task.keys("reward")
        if (reward := reward_of(task.reward)) is None or not reward.lists:
            message = (
                f'{rewards[0]} = "{task.reward}" grades one trajectory; name a function of yours, or {scopes[0]} = '
                '"trajectory"'
            )
            yield Finding((*rewards, *scopes), message)
        if is_judged(task.reward) and not task.tournament:
            message = f'{rewards[0]} = "{task.reward}" compares two members; set such as "round_robin"'
            yield Finding((*task.keys("tournament"), *scopes), message)
        if config.buffer.stale == "reissue":
            message = (
                f'{scopes[0]} = "group": a member that is issued again would change the scores of all others; set '
                'buffer.stale = "drop" or "mask"'
            )
            yield Finding(("buffer.stale", *scopes), message)


def _late(config: Config) -> Iterator[Finding]:
    """Members that continue after a batch took the first of their group: each is graded and trained alone."""
    rollout = config.rollout
    if rollout.late == "drop":
        return
    if not rollout.oversample:
        message = "has no effect without further members; set such as rollout.oversample = 2"
        yield Finding(("rollout.late", "rollout.oversample"), message)
    for task in graded_tasks(config).values():
        if task.reward_scope == "group":
            message = 'late members have a grade of their own, and the reward grades whole groups once; set "drop"'
            yield Finding(("rollout.late", *task.keys("reward_scope")), message)
    if config.learner.aggregation == "group":
        message = 'a late member alone would count as a whole group; set learner.aggregation = "token"'
        yield Finding(("rollout.late", "learner.aggregation"), message)


def _judge_engines(config: Config) -> Iterator[Finding]:
    """Engines that judge for rubric files."""
    judged = any(is_judged(task.reward) for task in graded_tasks(config).values())
    if config.reward.judge_engines and not judged:
        message = "has no effect: no reward is a rubric file; leave it out, or name one, such as rubric.toml"
        yield Finding(("reward.judge_engines", "reward.function"), message)


def _without_learner(config: Config) -> Iterator[Finding]:
    """Batches that nothing trains: lag would end the sampling."""
    lag, steps = config.buffer.max_lag, config.learner.steps
    if not config.trains and {"prompter", "buffer"} <= set(config.only) and lag < steps:
        message = (
            f"no learner runs, and from batch {lag + 2} on every token would exceed buffer.max_lag = {lag}; add the "
            "learner, or sample without training: asyncrl rollout CONFIG --prompts N -o FILE.parquet"
        )
        yield Finding(("only", "buffer.max_lag", "learner.steps"), message)


def _timeout_reward(config: Config) -> Iterator[Finding]:
    """A reward for trajectories whose call takes too long, of which a server or a group would give all the same."""
    if config.reward.timeout_reward is None:
        return
    for task in graded_tasks(config).values():
        keys = ("reward.timeout_reward", *task.keys("reward"), *task.keys("reward_scope"))
        if (reward := reward_of(task.reward)) is not None and reward.remote:
            message = "the reward is a server: while it is down, every trajectory would get this reward; leave it out"
            yield Finding(keys, message)
        elif task.reward_scope == "group":
            message = "the reward grades whole groups, whose members would all get this reward; leave it out"
            yield Finding(keys, message)


def _tournament(config: Config, task: Task) -> Iterator[Finding]:
    """A tournament ranks the members of a group, of which there are two at least, before the group has to end."""
    tournaments, scopes = task.keys("tournament"), task.keys("reward_scope")
    if task.reward_scope != "group":
        message = f'ranks the members of a group, but {scopes[0]} = "{task.reward_scope}"; set {scopes[0]} = "group"'
        yield Finding((*tournaments, *scopes), message)
        return
    for one in every_task(config):
        if one.name == task.name and one.group_size == 1:
            sizes = one.keys("group_size")
            message = f"{sizes[0]} = 1 leaves nothing to compare with; raise it, or leave the tournament out"
            yield Finding((*tournaments, *sizes), message)
    for held_out in held_out_sets(config).values():
        if (
            held_out.samples == 1
            and held_out.name in ("", task.name)
            and (task.table == "eval.sets") == bool(held_out.name)
        ):
            samples = held_out.key("samples")
            message = (
                f"{samples} = 1 leaves nothing to compare: the reward ranks the answers to one row; raise it, or give "
                "evaluations a reward of their own in [eval.sets.NAME]"
            )
            yield Finding((*tournaments, samples, "eval.samples"), message)


def _overlong(config: Config) -> Iterator[Finding]:
    overlong = config.reward.overlong
    if not overlong.penalty:
        yield from unused(config, "reward.overlong", "reward.overlong.penalty", "reward.overlong.penalty is 0")
        return
    longest = overlong.longest_tokens or config.rollout.max_new_tokens
    if overlong.interval_tokens > longest:
        source = "longest_tokens" if overlong.longest_tokens else "rollout.max_new_tokens"
        message = (
            f"found {overlong.interval_tokens}, expected at most {longest}, the longest trajectory ({source}); lower it"
        )
        yield Finding(
            ("reward.overlong.interval_tokens", "reward.overlong.longest_tokens", "reward.overlong.penalty"), message
        )


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
            message = (
                f"tasks.{name}.eval_source is not evaluated, since eval.sets names other sources; add a set for it"
            )
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
            message = (
                f"{keys[0]} is given, but eval.prompts = 0 evaluates nothing; set eval.prompts to the rows of an "
                f"evaluation, such as 512 (a source with fewer rows is evaluated whole), or remove {keys[0]}"
            )
            yield Finding((*keys, "eval.prompts"), message)


def _one_set(config: Config, held_out: HeldOut) -> Iterator[Finding]:
    prompts, samples, pass_at, tokens = map(held_out.key, ("prompts", "samples", "pass_at", "max_new_tokens"))
    if held_out.members > _MOST:
        message = f"{held_out.prompts} prompts of {held_out.samples} answers are {held_out.members} trajectories"
        yield Finding((prompts, samples), f"{message}; an evaluation has {_MOST} at most; lower one of them")
    if len(set(held_out.pass_at)) < len(held_out.pass_at):
        yield Finding((pass_at,), f"found {held_out.pass_at}, expected each number once")
    above = [k for k in held_out.pass_at if k > held_out.samples]
    if above:
        message = f"pass@{above[0]} needs as many answers of a prompt, and {samples} = {held_out.samples}; raise it"
        yield Finding((pass_at, samples), message)
    if held_out.samples > 1 and held_out.temperature == 0:
        message = f"{held_out.samples} answers at temperature 0 are all equal; raise {held_out.key('temperature')}"
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
