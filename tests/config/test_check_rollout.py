"""Settings of grades and of runs without a learner that cannot hold together."""

import pytest

from harness.configs import the_problem

KEYS = "reward.timeout_reward reward.function reward.scope"


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["reward.timeout_reward=0", "reward.function=http://grader:80/g"], KEYS),
        (["reward.timeout_reward=0", "reward.function=my.py:f", "reward.scope=group", "eval.prompts=0"], KEYS),
        (["only=['prompter', 'rollout', 'engine', 'buffer']"], "only buffer.max_lag learner.steps"),
    ],
)
def test_settings_that_cannot_hold_together_name_the_first_of_them(overrides: list[str], keys: str):
    problem = the_problem("demo", *overrides)

    assert problem.key == f"--set {keys.split()[0]}"
