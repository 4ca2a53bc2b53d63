"""A setting that does not exist is answered with the one that is meant, also under the names of other frameworks."""

import pytest

from asyncrl.algorithms.losses import LOSSES
from asyncrl.config.load import ConfigError
from asyncrl.config.meant import FOREIGN, meant_by, option_meant_by
from asyncrl.config.reference import known_settings
from harness.configs import from_settings


def test_every_name_of_another_framework_leads_to_a_setting():
    assert set(FOREIGN.values()) <= set(known_settings())


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("trainer.lr=1e-5", "learner.lr"),
        ("learner.learning_rate=1e-5", "learner.lr"),
        ("learning_rate=1e-5", "learner.lr"),
        ("algorithm.adv_estimator=grpo", "learner.advantage"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "learner.reference.kl_coef"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "learner.lr"),
        ("actor_rollout_ref.rollout.n=8", "rollout.group_size"),
        ("data.train_files=train.parquet", "task.source"),
        ("rollout-batch-size=32", "buffer.batch_groups"),
        ("num_generations=8", "rollout.group_size"),
        ("max_async_level=2", "buffer.max_lag"),
        ("rolout.slots=8", "rollout"),
        ("learner.stepz=8", "learner.steps"),
        ("learner.context=2", "learner.layout.context"),
        ("learner.context_parallel=2", "learner.layout.context"),
    ],
)
def test_an_unknown_setting_is_answered_with_the_one_that_is_meant(written: str, meant: str):
    with pytest.raises(ConfigError) as refused:
        from_settings(written)

    assert str(refused.value) == f"--set {written.partition('=')[0]}: unknown setting; did you mean {meant}?"


def test_a_name_that_is_near_to_none_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"--set foo\.bar: unknown setting; expected one of run, seed, "):
        from_settings("foo.bar=1")
    assert meant_by("recorder.zzzzzz", ["plot"]) == []


def test_an_option_of_a_loss_is_found_by_other_names():
    options = LOSSES["ppo"].__struct_fields__

    assert [option_meant_by(name, options) for name in ("kl_coef", "eps_clip", "clip_lo", "zzz")] == [
        "kl",
        "clip_low",
        "clip_low",
        "",
    ]
    with pytest.raises(ConfigError, match='has no option "kl_coef", did you mean "kl"'):
        from_settings("learner.loss_options.kl_coef=0.1")
