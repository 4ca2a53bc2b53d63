"""Pools of workers in a config: their settings, what is checked of them, and the queues that they have."""

import pytest

from asyncrl.config.load import load_config
from asyncrl.config.slots import all_slots, slots_for
from asyncrl.config.worker_pools import config_of_actor, worker_pools
from asyncrl.run.user_actors import ActorsError, with_pools
from harness.configs import SOUND, TWO_TASKS, the_problem
from topics.prompts import PROMPT_ISSUED
from topics.roles import Role, WorkerPool
from topics.table import BUILT_IN

POOLS = (
    TWO_TASKS
    + SOUND
    + """
rollout.workers = 2
rollout.slots = 16
[rollout.pools.code]
workers = 4
tasks = ["sums"]
slots = 8
tool_limit_s = 600
sandbox = { memory_mb = 8192 }
[reward.pools.code]
workers = 2
time_limit_s = 120
"""
)


def test_a_pool_takes_what_it_leaves_out_from_the_settings_of_all_workers(written):
    config = load_config(written(POOLS)).config

    own, other = config_of_actor(config, "rollout-code-3"), config_of_actor(config, "rollout-3")
    assert (own.rollout.slots, own.rollout.tool_limit_s, own.rollout.max_new_tokens) == (8, 600, 11)
    assert (own.sandbox.memory_mb, own.sandbox.disk_mb) == (8192, config.sandbox.disk_mb)
    assert other == config
    assert (slots_for(config, "sums"), slots_for(config, "words")) == (("rollout.pools.code", 32), ("rollout", 32))
    assert all_slots(config) == 64
    grader = config_of_actor(config, "reward-code-1")
    assert (grader.reward.time_limit_s, grader.reward.children, grader.rollout) == (120, 1, config.rollout)
    assert [(pool.pool, pool.tasks) for pool in worker_pools(config)] == [
        ("rollout-code", ("sums",)),
        ("reward-code", ("sums",)),
    ]


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("", "rollout.pools.code.tasks", "names no task, so that its workers have no work; known are words, sums"),
        (
            "tasks = ['sumz']\n[reward.pools.code]\nworkers = 2",
            "rollout.pools.code.tasks",
            'names the task "sumz"; known are words, sums',
        ),
        (
            "tasks = ['sums']\n[rollout.pools.more]\ntasks = ['words', 'sums']",
            "rollout.pools.code.tasks",
            'found the task "sums" 2 times; name it once, in one pool of rollout',
        ),
        ("tasks = ['sums']\nsandbox = { cors = 2 }", "rollout.pools.code.sandbox", "unknown field `cors`"),
        (
            "tasks = ['sums']\nslots = 3",
            "rollout.group_size",
            "larger than all open trajectories: rollout.pools.code.workers * rollout.pools.code.slots = 3",
        ),
    ],
)
def test_each_pool_is_checked_at_its_lines(written, text, key, message):
    problem = the_problem(written(TWO_TASKS + SOUND + f"rollout.group_size = 8\n[rollout.pools.code]\n{text}\n"))

    assert problem.key == key
    assert message in problem.message


def test_a_pool_with_the_name_of_a_queue_is_refused(written):
    problem = the_problem(written(TWO_TASKS + SOUND + "[rollout.pools.eval]\ntasks = ['sums']\n"))

    assert problem.key == "rollout.pools.eval"
    assert "expected a letter, then up to 15 of a to z and 0 to 9, and not eval" in problem.message


def test_a_prompt_is_in_the_queue_of_its_pool_alone(written):
    tables = BUILT_IN.with_pools(worker_pools(load_config(written(POOLS)).config))

    patterns = {queue.name: queue.pattern("demo") for queue in tables.queues_of("rollout")}
    assert patterns == {
        "rollout": "asyncrl.demo.prompt.issued.*",
        "rollout-eval": "asyncrl.demo.prompt.issued.eval.*",
        "rollout-code": "asyncrl.demo.prompt.issued.code.*",
        "rollout-code-eval": "asyncrl.demo.prompt.issued.eval.code.*",
    }
    for task, pool in (("sums", "rollout-code"), ("words", "rollout"), ("warmup", "rollout")):
        assert [queue.name for queue in tables.queues_for("rollout", task)] == [pool, f"{pool}-eval"]
        token = tables.pool_name(PROMPT_ISSUED, task)
        for key, queue in (("p000001-0", pool), ("e000001-0", f"{pool}-eval")):
            subject = PROMPT_ISSUED.subject("demo", key, token)
            assert subject == patterns[queue].removesuffix("*") + key
            assert tables.topic_of(subject) is PROMPT_ISSUED
            assert subject in tables.subjects(PROMPT_ISSUED, "demo", key)
    assert {queue.name: queue.pattern("demo") for queue in tables.queues_of("reward")} == {
        "reward": "asyncrl.demo.trajectory.generated.*",
        "reward-code": "asyncrl.demo.trajectory.generated.code.*",
    }


def test_an_actor_of_a_user_shares_no_messages_that_pools_divide():
    tables = BUILT_IN.extended([(Role("critic", "worker", 4, queue="prompt.issued"), [])])

    with_pools(tables, [WorkerPool("reward", "code", ("sums",))])
    with pytest.raises(ActorsError, match=r"role critic: its queue is prompt\.issued, which the pools divide"):
        with_pools(tables, [WorkerPool("rollout", "code", ("sums",))])


def test_a_reward_pool_without_tasks_needs_a_rollout_pool_of_its_name(written):
    problem = the_problem(written(TWO_TASKS + SOUND + "[reward.pools.code]\nworkers = 2\n"))

    assert problem.key == "reward.pools.code.tasks"
    assert problem.message.startswith("names no task, so that its workers have no work; known are words, sums")
