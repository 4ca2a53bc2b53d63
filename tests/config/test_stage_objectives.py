"""Objectives of stages, and when a stage begins by itself, against the rule applied by hand."""

import msgspec
import pytest

from asyncrl.config.check_learner import needed_columns
from asyncrl.config.load import ConfigError, load_config
from asyncrl.config.settings import Config
from asyncrl.config.staged import Ended, Schedule, all_filters, as_in
from asyncrl.config.tasks import Mixture
from asyncrl.training.objective import objective_of, with_other_settings
from harness.configs import SOUND
from topics.batches import BatchGroup, BatchPacked, Penalty

STAGES = """
[stages.wide]
loss = "ppo"
advantage = "rloo"
filters = ["zero_variance"]
aggregation = "trajectory"
[stages.clipped]
loss_options = { correction_cap = 3.0 }
[stages.plain]
"""


def test_the_objective_of_a_step_is_that_of_its_stage(written):
    config = load_config(written(SOUND + STAGES)).config
    base, wide, clipped, plain = (objective_of(config, 3, name) for name in ("", "wide", "clipped", "plain"))

    assert (wide.stage, wide.loss, wide.filters, wide.aggregation) == ("wide", "ppo", ["zero_variance"], "trajectory")
    assert wide.loss_options["clip_low"] == 0.2  # options of another loss are its defaults
    assert (clipped.loss, clipped.loss_options) == ("decoupled", base.loss_options | {"correction_cap": 3.0})
    assert plain == msgspec.structs.replace(base, stage="plain")
    assert base.stage is None
    assert all_filters(config) == ["zero_variance"]
    assert Mixture(config).task(4, [(4, "wide")]).advantage == "rloo"
    assert Mixture(config).task(3, [(4, "wide")]).advantage == "grpo"
    assert config.learner.loss == "decoupled", "the settings themselves stay"


def test_a_replay_with_other_settings_keeps_what_a_stage_gives(written):
    was = load_config(written(SOUND + STAGES)).config
    learner = msgspec.structs.replace(was.learner, loss="gspo", advantage="centered", max_grad_norm=0.5)
    now = msgspec.structs.replace(was, learner=learner)

    def replayed(stage, estimator):
        packed = BatchPacked(3, "rl", [BatchGroup("p000000", [], estimator=estimator)], 0, objective_of(was, 3, stage))
        found = with_other_settings(packed, was, now)
        return found.objective.loss, found.objective.max_grad_norm, found.groups[0].estimator

    assert replayed("", "grpo") == ("gspo", 0.5, "centered")
    assert replayed("wide", "rloo") == ("ppo", 0.5, "rloo")
    assert replayed("plain", "grpo") == ("gspo", 0.5, "centered")
    assert as_in(now, "wide").learner.loss == "ppo"


MODELS = """
[stages.slow]
lr = 1e-4
max_grad_norm = 0.25
loss_options = { kl = 0.01, entropy = 0.002 }
reference = { kl_coef = 0.05, kl_estimator = "k2" }
critic = { lr = 2e-5, gae_lambda = 0.8, value_clip = 0.0 }
teacher = { coef = 0.5 }
"""
CRITIC = ["learner.advantage=gae", "learner.schedule=linear", "learner.steps=100", "learner.critic.lr_warmup_steps=4"]


def test_rates_penalties_and_the_critic_of_a_step_are_those_of_its_stage(written):
    teacher = ["learner.teacher.url=http://localhost:1", "learner.reference.kl_of=trainer"]
    config = load_config(written(SOUND + MODELS), overrides=[*CRITIC, *teacher]).config
    base, slow = (objective_of(config, 51, stage) for stage in ("", "slow"))

    left = base.learning_rate / config.learner.lr
    assert 0.4 < left < 0.6
    assert slow.learning_rate == pytest.approx(1e-4 * left)  # the schedule goes on
    assert (slow.max_grad_norm, slow.loss_options["kl"], slow.loss_options["entropy"]) == (0.25, 0.01, 0.002)
    assert slow.penalties == [Penalty("reference", 0.05, "k2", True), Penalty("teacher", 0.5, "k1", False)]
    assert [one.column for one in base.penalties] == ["teacher"]
    changed = {"learning_rate": 2e-5, "gae_lambda": 0.8, "value_clip": 0.0}
    assert slow.critic == msgspec.structs.replace(base.critic, **changed)
    assert objective_of(config, 1, "slow").critic.learning_rate == 2e-5 / 4
    assert ("stages.slow.reference.kl_coef", "reference") in list(needed_columns(config))


def test_a_stage_changes_no_model_that_the_run_does_not_have(written):
    with pytest.raises(ConfigError) as caught:
        load_config(written(SOUND + MODELS))

    message = str(caught.value)
    assert "stages.slow.critic.lr" in message
    assert "stages.slow.teacher.coef" in message
    assert "stages.slow.reference" not in message, "the stage needs it itself"


def test_a_stage_without_its_teacher_cannot_leave_all_to_the_teacher(written):
    given = SOUND + "[stages.alone]\nteacher = { coef = 0.0 }\n"
    with pytest.raises(ConfigError, match=r"stages\.alone\.teacher\.coef"):
        load_config(written(given), overrides=["learner.advantage=zero", "learner.teacher.url=http://localhost:1"])


def scheduled(**stages):
    return Schedule(msgspec.convert({"stages": stages}, Config))


def test_stages_begin_by_their_steps_in_the_order_of_the_config_each_once():
    schedule = scheduled(second={"at_step": 5}, asked={}, third={"at_step": 3})

    assert schedule.due(Ended(step=4), []) == ""
    assert schedule.due(Ended(step=5), []) == "second"
    assert schedule.due(Ended(step=5), [(40, "second")]) == "third"
    assert schedule.due(Ended(step=9), [(40, "second"), (44, "third"), (50, "asked")]) == ""


def test_a_stage_begins_once_the_groups_of_the_running_one_are_good_enough():
    schedule, ended, begun = scheduled(hard={"at_accuracy": 0.5, "accuracy_groups": 3}), Ended(), []
    reached = []
    # Mean rewards 1, 0, 0, 0.5, 1: of the newest three 1/3, 1/6 and 1/2.
    for number, scores in enumerate([[1, 1], [0, 0], [0, 0, 0], [1, 0], [1, 1]]):
        schedule.count(ended, f"p{number:06d}", scores)
        reached.append(schedule.due(ended, begun))

    assert reached == ["", "", "", "", "hard"]
    schedule.count(ended, "p000009", [])  # ended for another reason
    schedule.count(ended, "e000001", [0.0])
    assert schedule.due(ended, begun) == "hard"
    # In a stage that began at prompt 4 the one group of it counts, whatever came before and comes later.
    schedule.count(ended, "p000005", [0.5])
    schedule.count(ended, "p000003", [1.0])
    assert schedule.due(ended, [(4, "other")]) == ""
    schedule.count(ended, "p000006", [0.0])
    assert schedule.due(ended, [(4, "other")]) == "hard"
