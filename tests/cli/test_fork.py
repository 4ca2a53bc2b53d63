"""The settings and the first prompt of a run that `asyncrl fork` starts."""

from pathlib import Path

import msgspec
import pytest

from actors.learner.retraining import TrainingLog
from asyncrl.cli.fork import begins_after, forked_config
from asyncrl.config.load import ConfigError, with_overrides
from asyncrl.config.settings import Config, StartSettings
from asyncrl.errors import LaunchError
from asyncrl.training.objective import objective_of
from harness.folds import Feed
from harness.prompter_feed import config as small_config
from topics.batches import BatchGroup, BatchPacked

START = {"start": {"checkpoint": "there", "step": 3, "prompt": 70}}


def log_of(**batches: list[str]) -> TrainingLog:
    log = TrainingLog()
    for number, names in enumerate(batches.values(), 1):
        fed = Feed(log).trained(number)
        log.batches[number] = (BatchPacked(number, "rl", [BatchGroup(name, []) for name in names], 0), fed.sequence)
    return log


def test_a_fork_goes_on_behind_every_prompt_that_was_packed():
    log = log_of(first=["p000004", "p000000"], second=["p000002", "r000009"], third=["p000031"])

    assert begins_after(log, small_config(), 2) == StartSettings(checkpoint="start", step=2, prompt=5)
    assert begins_after(log, small_config(), 0).prompt == 0
    assert begins_after(log, msgspec.convert({"warmup": {"steps": 4}}, Config), 3).prompt == 32
    assert begins_after(TrainingLog(), small_config(**START), 3).prompt == 70
    with pytest.raises(
        LaunchError, match="--at 4: run run can be forked at its steps 0 to 3; its checkpoints are at none"
    ):
        begins_after(log, small_config(), 4)
    with pytest.raises(LaunchError, match="--at 0: run run has trained no step of RL yet that it could be forked at"):
        begins_after(TrainingLog(), msgspec.convert({"warmup": {"steps": 4}}, Config), 0)


def test_a_fork_has_the_stages_up_to_its_first_prompt():
    log = log_of(first=["p000004", "p000000"], second=["p000031"])
    run = small_config(start={"prompt": 2, "stages": {"1": "old"}})
    stages = [(3, "wide"), (3, "sums"), (5, "wide"), (6, "sums")]

    assert begins_after(log, run, 1, stages).stages == {"1": "old", "3": "sums", "5": "wide"}
    assert begins_after(log, run, 2, stages).stages == {"1": "old", "3": "sums", "5": "wide", "6": "sums"}


def test_a_fork_takes_the_id_of_no_other_run(tmp_path: Path):
    start = StartSettings(checkpoint="start", step=3, prompt=70)
    (tmp_path / "own").mkdir()

    with pytest.raises(LaunchError, match=r"/own is a run; give the new run another id, or .*: asyncrl rm own"):
        forked_config(small_config(), start, ["run=own"], tmp_path, tmp_path)
    assert forked_config(small_config(), start, ["run=other"], tmp_path, tmp_path).run == "other"


def test_a_fork_has_the_settings_of_its_run_but_for_those_given(tmp_path: Path):
    start = StartSettings(checkpoint="start", step=3, prompt=70)
    config = small_config(warmup={"steps": 4})

    forked = forked_config(config, start, ["learner.lr=0.5", "run=new"], tmp_path, tmp_path)

    assert (forked.run, forked.learner.lr, forked.start, forked.warmup.steps) == ("new", 0.5, start, 0)
    assert forked.rollout == config.rollout
    with pytest.raises(ConfigError, match=r"learner.steps = 5 leaves nothing to train after start.step = 5"):
        forked_config(config, msgspec.structs.replace(start, step=5), [], tmp_path, tmp_path)
    with pytest.raises(LaunchError, match="--at gives what the new run starts with"):
        forked_config(config, start, ["start.prompt=3"], tmp_path, tmp_path)


def test_a_fork_goes_on_with_the_critic_of_its_run_and_one_that_adds_it_begins_its_warm_up(tmp_path: Path):
    log, ppo = log_of(first=["p000004"], second=["p000031"]), ["learner.advantage=gae", "learner.loss=ppo"]
    ppo += ["learner.critic.warmup_steps=3", "learner.critic.lr_warmup_steps=8", "learner.steps=9"]
    config = with_overrides(small_config(), ppo)
    forked = forked_config(config, begins_after(log, config, 2), [], tmp_path, tmp_path)
    again = forked_config(forked, begins_after(log, forked, 2), [], tmp_path, tmp_path)
    added = forked_config(small_config(), begins_after(log, small_config(), 2), ppo, tmp_path, tmp_path)

    steps = [objective_of(config, step).critic for step in range(1, 6)]
    assert [step.alone for step in steps if step is not None] == [True, True, True, False, False]
    for other in (forked, again):
        assert [objective_of(other, step).critic for step in (3, 4, 5)] == steps[2:]
    assert [objective_of(added, step).critic for step in (3, 4, 5)] == steps[:3]


def test_a_fork_keeps_the_adapters_that_its_run_trained(tmp_path: Path):
    start = StartSettings(checkpoint="start", step=3, prompt=70)
    lora = {"rank": 4, "targets": ["q_proj", "v_proj"]}
    config = small_config(learner={"lora": lora})

    kept = ["learner.lora.publish=adapter", "learner.lora.targets=['v_proj', 'q_proj']"]
    assert forked_config(config, start, kept, tmp_path, tmp_path).learner.lora.publish == "adapter"
    for other in (["learner.lora.rank=8"], ["learner.lora.alpha=8"], ["learner.lora.targets=['q_proj']"]):
        with pytest.raises(LaunchError, match="adapters of rank 4 and alpha 32 on q_proj, v_proj, which would be lost"):
            forked_config(config, start, other, tmp_path, tmp_path)


def test_a_fork_that_adds_adapters_publishes_them_with_the_weights_that_its_run_trained(tmp_path: Path):
    start = StartSettings(checkpoint="start", step=3, prompt=70)
    added = ["learner.lora.rank=8"]
    forked = forked_config(small_config(), start, added, tmp_path, tmp_path)
    again = forked_config(forked, start, [], tmp_path, tmp_path)
    assert [one.learner.lora.rank for one in (forked, again)] == [8, 8]
    added += ["learner.lora.publish=adapter"]
    for run in (small_config(), forked, again):
        with pytest.raises(ConfigError, match=r"found .adapter.: the weights below .* set .merged., or begin a run"):
            forked_config(run, start, added, tmp_path, tmp_path)
    start = msgspec.structs.replace(start, step=0)
    untrained = small_config(warmup={"steps": 0})
    assert forked_config(untrained, start, added, tmp_path, tmp_path).learner.lora.publish == "adapter"
