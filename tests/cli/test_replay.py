"""`asyncrl replay` trains again from the logs alone, bit for bit; `asyncrl fork` starts a run from any of its steps."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from actors.learner.fetching import fetch_trajectories
from actors.learner.retraining import ReplayedStep, ReplayError, first_difference, medians
from actors.prompter.fold import PrompterFold
from actors.runtime.actor import ActorFault
from asyncrl import load_dump
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from asyncrl.cli.replay import Replay, replay_config, replay_text
from asyncrl.config.load import ConfigError, load_config
from asyncrl.config.settings import CreateModelSettings
from asyncrl.config.trainers import trainer_kind
from asyncrl.run.directory import RunFiles
from asyncrl.run.preflight import check_surroundings
from asyncrl.training.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from asyncrl.training.init_model import create_model
from asyncrl.training.objective import objective_of, with_other_settings
from harness.audited import messages_on
from harness.buffer_feed import feed as buffer_feed
from harness.folds import Feed
from harness.gated import closed_gate
from harness.prompter_feed import config as small_config
from harness.prompter_feed import issue
from harness.runs import PACED, Run, command, fork, resume, topics_left_in, up
from harness.stage import Stage
from harness.stories import result
from topics.batches import BATCH_PACKED, BatchGroup, BatchMember, BatchPacked
from topics.prompts import PROMPT_ISSUED
from topics.topic import BATCHES, PROMPTS, TRAINING, TRAJECTORIES
from topics.trajectories import Reference
from topics.weights import WEIGHTS_PUBLISHED

SLOW = pytest.mark.slow
STEPS, WARMUP = 9, 4
START = {"start": {"checkpoint": "there", "step": 3, "prompt": 70}}


# --- pure parts


def steps(*found: tuple[int, str, float, float, str, str]) -> list[ReplayedStep]:
    return [ReplayedStep(step, stage, {"loss": a, "ess": 1.0}, {"loss": b}, x, y) for step, stage, a, b, x, y in found]


def test_the_first_step_that_differs_is_named():
    found = steps((0, "warmup", 3.0, 3.0, "aa", "aa"), (1, "rl", 1.0, 1.0, "", ""), (2, "rl", 1.0, 2.0, "bb", "cc"))
    replay = Replay("demo", {}, "the untrained model", -1, 2, found, {})

    assert first_difference(found[:2]) is None
    assert replay_text(replay._replace(steps=found[:2])) == "2 steps, all 1 published version bit-equal"
    assert replay_text(replay._replace(steps=[])) == "no step to train again: the weights are those of step -1"
    assert replay_text(replay).startswith("step 2 differs: version 2 was published with digest bb, the replay has cc")
    assert replay_text(replay._replace(ranks=2)).endswith("2 ranks, a replay one: sums are rounded in another order")


def test_medians_are_those_of_rl_and_of_what_both_have():
    found = steps((0, "warmup", 9.0, 9.0, "", ""), (1, "rl", 1.0, 2.0, "", ""), (2, "rl", 3.0, 6.0, "", ""))

    assert medians(found) == {"loss": (2.0, 4.0)}
    assert medians(found[:1]) == {"loss": (9.0, 9.0)}


def test_a_replay_changes_the_learner_alone():
    config = small_config()

    assert replay_config(config, ["learner.steps=5"]) == (config, {})
    other, changed = replay_config(config, ["learner.lr=0.5", "learner.max_grad_norm=0.1"])
    assert changed == {"learner.lr": [1e-6, 0.5], "learner.max_grad_norm": [1.0, 0.1]}
    assert other.learner.lr == 0.5
    with pytest.raises(ReplayError, match=r"--set rollout.temperature=2: .* only learner\.\* may change"):
        replay_config(config, ["rollout.temperature=2"])
    with pytest.raises(ConfigError, match=r"--set learner\.lr: found -1"):
        replay_config(config, ["learner.lr=-1"])


def test_a_replay_puts_its_settings_in_place_of_the_runs_and_keeps_what_else_was_recorded():
    config = small_config()
    other, _ = replay_config(config, ["learner.lr=0.5", "learner.loss_options.correction_cap=3"])
    groups = [packed_group("p000000", 0.0, 1.0), packed_group("p000001", 1.0, 1.0)]
    packed = BatchPacked(1, "rl", groups, 0, msgspec.structs.replace(objective_of(config, 1), max_grad_norm=9.0))

    assert with_other_settings(packed, config, config) == packed
    changed = with_other_settings(packed, config, other).objective
    assert (changed.learning_rate, changed.loss_options["correction_cap"], changed.max_grad_norm) == (0.5, 3, 9.0)
    other, _ = replay_config(config, ["learner.advantage=centered", "learner.filters=['zero_variance']"])
    changed = with_other_settings(packed, config, other)
    assert changed.objective.filters == ["zero_variance"]
    assert [(group.prompt_id, group.estimator) for group in changed.groups] == [("p000000", "centered")]
    window = ["learner.filters=['pass_rate']", "learner.filter_options.pass_rate.below=0.5"]
    assert with_other_settings(packed, config, replay_config(config, window)[0]).groups == []
    with pytest.raises(ReplayError, match=r"garbage reads a metric that the run did not compute"):
        replay_config(config, ["learner.filters=['garbage']"])
    with pytest.raises(ReplayError, match=r"no batch has the groups that zero_variance dropped; .* only adds"):
        replay_config(other, ["learner.filters=[]"])


def packed_group(name: str, *rewards: float) -> BatchGroup:
    members = [BatchMember(f"{name}-{at}", 0, Reference(at + 1, "00", 1), rewards[at], 3) for at in range(len(rewards))]
    return BatchGroup(name, members, estimator="grpo")


def test_a_start_is_a_checkpoint_of_the_step_that_is_given(tmp_path: Path):
    write_checkpoint(tmp_path, Checkpoint(0, 3, "ab" * 8, 1), lambda aside: {})
    (tmp_path / "config.toml").write_text('[start]\ncheckpoint = "step000003-lineage0-abababababab"\nstep = 3\n')
    written = str(tmp_path / "config.toml")

    assert load_config(written, further=check_surroundings).config.start.step == 3
    for overrides, message in (
        (["start.step=4"], "--set start.step: found 4, the checkpoint is of step 3"),
        (["start.checkpoint=none"], "this is no complete checkpoint"),
        (["start.checkpoint="], "start.step = 3 without start.checkpoint"),
        (["warmup.steps=2"], "the warm-up of start.checkpoint is done; set 0"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_config(written, overrides=overrides, further=check_surroundings)


def test_prompter_and_buffer_go_on_after_the_start():
    prompter = Feed(PrompterFold(small_config(**START)))
    assert issue(prompter)[0] == "p000070-0"
    assert prompter.fold.open_groups == 4  # two of five batches are left, of two groups each
    assert prompter.fold.wanted() == []

    buffer = buffer_feed(origin=3).group("p000070", versions=((3, 3),)).group("p000071", versions=((2, 3),))
    (batch,) = buffer.fold.decide(0)
    assert (batch.step, batch.min_version) == (4, 2)


async def test_damaged_tokens_are_named(bus: Bus, stage: Callable[..., Stage]):
    sequence = await publish(bus, result("p000000-0", ()))
    for reference, message in (
        (Reference(sequence, "00", 1), r"batch 1, p000000-0: the tokens in message \d+ have digest .*, 00 was graded"),
        (Reference(sequence + 1, "00", 1), "batch 1, p000000-0: the tokens in message 2 are gone"),
    ):
        group = BatchGroup("p000000", [BatchMember("p000000-0", 0, reference, 1.0, 1)])
        with pytest.raises(ActorFault, match=message):
            await fetch_trajectories(bus, BatchPacked(1, "rl", [group], 0))


# --- a run whose learner was killed three times, trained again


REWARD = """
def reward(completion: str) -> float:
    return len(set(completion)) / 8
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run with reference and teacher; checkpoints are at the steps 0, 8, 9 and once from 4 to 7; the last
    two are kept."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "graded.py").write_text(REWARD)
    create_model(folder / "teacher", alphabet=CreateModelSettings().alphabet, seed=5)
    length = [f"learner.steps={STEPS}", "learner.checkpoint_every=4", "nats.keep=run"]
    roles = ["reference.kl_coef=0.01", "reference.refresh_every=3", "teacher.model=teacher", "teacher.coef=0.001"]
    settings = [*length, *(f"learner.{role}" for role in roles), "reward.function=graded.py:reward"]
    settings += ["task.rollout=gated.py:rollout"]
    gate = closed_gate(folder, 6)

    async def play() -> Run:
        async with up(folder, *settings) as run:
            for step in (1, 3, 6):
                await run.reaches(lambda step=step: step in run.steps(), f"step {step}")
                await run.kill("learner-1")
            gate.unlink()
            assert await run.ended() == 0, run.story
        return run

    return asyncio.run(play())


@SLOW
async def test_a_learner_that_was_killed_has_the_weights_of_an_undisturbed_one(killed: Run):
    assert killed.out.count("learner-1 started again") >= 3
    assert all({"reference_kl", "teacher_kl"} <= row.keys() for row in killed.rows() if row["step"] > 0)
    code, output = await command(killed.folder, "replay", "short")

    assert code == 0, output
    assert output.startswith(f"run short: from the untrained model, steps {1 - WARMUP} to {STEPS}\n")
    assert output.endswith(f"{STEPS + WARMUP} steps, all {STEPS + 1} published versions bit-equal\n")


@SLOW
async def test_a_replay_begins_at_a_checkpoint_and_ends_at_the_given_step(killed: Run, tmp_path: Path):
    words = ["--from", "8", "--to", "9", "--output", str(tmp_path / "out"), "--checkpoint", str(tmp_path)]
    code, output = await command(killed.folder, "replay", "short", *words)

    assert code == 0, output
    found = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert found["began_with"].startswith("checkpoint step000008-lineage0-")
    assert [step["step"] for step in found["steps"]] == [9]
    assert (found["published_versions"], found["first_different_step"], found["settings"]) == (1, None, {})
    assert read_checkpoint(Path(found["files"]["checkpoint"])).digest == found["steps"][0]["published"]
    code, output = await command(killed.folder, "replay", "short", "--to", "10")
    assert (code, output) == (1, "--to 10: the run trained the steps -3 to 9\n")


@SLOW
async def test_a_dumped_batch_has_the_figures_of_its_step(killed: Run, tmp_path: Path):
    code, output = await command(killed.folder, "dump", "short", "--step", "9", "--output", str(tmp_path / "dump"))
    assert (code, output) == (0, f"{tmp_path / 'dump'}\n")
    dump = load_dump(tmp_path / "dump")
    config, trained = RunFiles(killed.root).read_config(), dump.trained
    files = RunFiles(killed.root)
    trainer = trainer_kind(config.learner.trainer).open(config, files.model_path(config.model), files.base)
    (checkpoint,) = killed.root.glob("checkpoints/step000008-*")
    trainer.load(checkpoint)

    found = trainer.step(dump.rows, dump.objective)

    assert trained is not None and found == {name: trained.metrics[name] for name in found}
    times = {"train_s", "wait_s", "fetch_s", "publish_s", "save_s", "train_tflops"}
    assert {"train_s", "wait_s"} <= trained.metrics.keys() - found.keys() <= times
    assert {"loss", "grad_norm", "reference_kl", "teacher_kl", "ess"} <= found.keys()
    samples = [json.loads(line) for line in (tmp_path / "dump" / "samples.jsonl").read_text().splitlines()]
    assert np.mean([sample["reward"] for sample in samples]) == pytest.approx(trained.rewards[0])
    assert all(sample["prompt"] for sample in samples) and any(sample["completion"] for sample in samples)
    members = [member for group in dump.batch.groups for member in group.members]
    assert [length for member in members for length in member.lengths] == [len(row.tokens) for row in dump.rows]
    assert sum(int(row.mask.sum()) for row in dump.rows) == sum(trained.lags.values())
    code, output = await command(killed.folder, "dump", "short", "--step", "9", "--output", str(tmp_path / "dump"))
    assert (code, output) == (1, f"{tmp_path / 'dump'} exists; name another one with --output\n")
    code, output = await command(killed.folder, "dump", "short", "--step", "10")
    assert code == 1 and output.startswith("batch 10 is not on the log, which has "), output


@SLOW
async def test_other_settings_give_a_report_beside_the_run(killed: Run):
    words = ["--set", "learner.lr=5e-4", "--set", "learner.loss_options.correction_cap=1.5", "--to", "3"]
    code, output = await command(killed.folder, "replay", *words)

    assert code == 0, output
    assert "other setting: learner.lr = 0.0005, the run had 0.001\n" in output
    out = killed.root / "replays" / "1"
    found = json.loads((out / "report.json").read_bytes())
    assert found["settings"] == {"learner.lr": [0.001, 0.0005], "learner.loss_options": [{}, {"correction_cap": 1.5}]}
    assert found["first_different_step"] == 1  # the warm-up has settings of its own
    assert found["medians"]["learning_rate"] == {"recorded": 0.001, "replayed": 0.0005}
    assert {"loss", "grad_norm", "clip_fraction", "reward_mean"} <= found["medians"].keys()
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "model" / "model.safetensors").exists()


@SLOW
async def test_trimmed_tokens_and_lost_checkpoints_are_reported(killed: Run, tmp_path: Path):
    root = tmp_path / "runs" / "short"
    shutil.copytree(killed.root, root)
    (root / "location").write_text(str(root.resolve()))  # as if it had been made here
    async with topics_left_in(root) as bus:
        (last,) = [batch for batch in (await messages_on(bus, BATCHES)).on(BATCH_PACKED) if batch.step == STEPS]
        needed = min(member.payload.sequence for group in last.groups for member in group.members)
        await bus.api(f"STREAM.PURGE.{TRAJECTORIES.full_name('short')}", {"seq": needed})

    code, output = await command(tmp_path, "replay", "short")
    assert code == 0, output
    assert output.startswith("run short: from checkpoint step000008-lineage0-")
    assert re.search(r"; the tokens of batch [5-8] and before are trimmed, steps 9 to 9\n", output)

    code, output = await command(tmp_path, "dump", "short", "--step", "1")
    assert (code, output.count("\n")) == (1, 1)
    gone = r"batch 1, p\d+-\d: the tokens in message \d+ are gone; batches with all tokens: .*9 \(nats.*\n"
    assert re.fullmatch(gone, output), output

    (kept,) = killed.root.glob("checkpoints/step000008-*/model.safetensors")
    kept.rename(kept.with_suffix(".away"))
    try:
        code, output = await command(tmp_path, "replay", "short")
    finally:
        kept.with_suffix(".away").rename(kept)
    assert code == 1
    assert re.match(r"the replay cannot begin; the tokens of batch [5-8] and before are trimmed; ", output)
    assert "model.safetensors: No such file or directory; this is no complete checkpoint, use another; " in output
    assert output.endswith("; checkpoints are left of step 8, 9; nats.keep = run keeps all tokens of a run\n")


# --- forked


async def assert_goes_on(killed: Run, new: Run, after: int, steps: int) -> None:
    """A fork has the weights of its beginning, is clean, repeats no prompt, and can be trained again itself."""
    code, output = await command(new.folder, "audit", new.root.name, "--deep")
    assert code == 0, output
    code, output = await command(new.folder, "replay", new.root.name)
    assert code == 0, output
    assert output.startswith(f"run {new.root.name}: from checkpoint step{after:06d}-lineage0-")
    assert output.endswith(f"{steps - after} steps, all {steps - after} published versions bit-equal\n")
    async with topics_left_in(killed.root) as bus:
        before = (await messages_on(bus, BATCHES)).on(BATCH_PACKED)
        digests = {
            version.version: version.digest for version in (await messages_on(bus, TRAINING)).on(WEIGHTS_PUBLISHED)
        }
    async with topics_left_in(new.root) as bus:
        packed = (await messages_on(bus, BATCHES)).on(BATCH_PACKED)
        issued = {message.prompt_id for message in (await messages_on(bus, PROMPTS)).on(PROMPT_ISSUED)}
        published = (await messages_on(bus, TRAINING)).on(WEIGHTS_PUBLISHED)
    trained = {group.prompt_id for batch in before if 0 < batch.step <= after for group in batch.groups}
    assert [batch.step for batch in packed] == list(range(after + 1, steps + 1))
    assert [version.version for version in published] == list(range(after, steps + 1))
    assert published[0].digest == digests[after]
    assert min(issued) == f"p{int(max(trained)[1:]) + 1:06d}"
    assert new.steps() == list(range(after + 1, steps + 1))


@SLOW
async def test_a_run_is_forked_at_a_checkpoint_with_other_settings(killed: Run):
    words = ["--at", "8", "--set", "learner.steps=13", "--set", "learner.lr=5e-4", "--set", "rollout.group_size=2"]
    async with fork(killed.folder, "short", "other", *words) as new:
        assert await new.ended() == 0, new.story

    assert f"run other in {new.root}, from step 8 of run short" in new.out
    await assert_goes_on(killed, new, 8, 13)
    assert {row["learning_rate"] for row in new.rows()} == {5e-4}


@SLOW
@pytest.mark.nightly
async def test_a_run_is_forked_between_checkpoints_and_the_fork_resumed(killed: Run):
    words = ["--at", "6", "--set", "learner.steps=24", "--set", PACED]
    async with fork(killed.folder, "short", "between", *words) as new:
        await new.reaches(lambda: len(new.steps()) > 2, "its third step")
        new.interrupt()
        assert await new.ended() == 0, new.story
    async with resume(killed.folder, "between") as again:
        assert await again.ended() == 0, again.story

    await assert_goes_on(killed, again, 6, 24)
    code, output = await command(killed.folder, "fork", "short", "--at", "12", "nobody")
    assert (code, output.count("\n")) == (1, 1)
    assert output.startswith("--at 12: run short can be forked at its steps 0 to 9; its checkpoints are at 8, 9\n")
