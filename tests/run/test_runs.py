"""Whole runs as a user sees them: they learn, they are told truly, they grow, and they survive kill -9."""

import json
import shutil
import string
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.server import EmbeddedServer
from asyncrl.config.load import PACKAGE
from harness.audited import Messages, assert_audited, assert_consistent, assert_within_lag, messages_on
from harness.gated import closed_gate
from harness.models import made_model
from harness.runs import GATED, WITHOUT_MODEL, Run, address_of, at_server, command, two_steps_more, up
from topics.batches import BATCH_PACKED
from topics.topic import BATCHES, TRAINING

pytestmark = pytest.mark.slow


def assert_password_unsaid(run: Run, password: str) -> None:
    """The password is in the private files that hold it, and in no other file of the run."""
    private = {run.root / "nats.json", run.root / "nats.conf"}
    for file in run.root.rglob("*"):
        if file.is_file() and file not in private and "nats" not in file.relative_to(run.root).parts[:1]:
            assert password.encode() not in file.read_bytes(), file
    assert all(file.stat().st_mode & 0o077 == 0 for file in private)


@pytest.mark.nightly  # the demo of the README is the same run with fewer letters
async def test_the_demo_learns_to_write_four_letters_backwards(tmp_path: Path):
    task = ["task.options.letters=4", "rollout.max_new_tokens=7", "eval.prompts=64", "buffer.batch_groups=32"]
    length = ["seed=3", "warmup.steps=48", "learner.steps=60", "learner.lr=2e-3"]  # from a sampled reward of 0.4
    async with up(tmp_path, *task, *length, config="demo") as run:
        await run.reaches(lambda: len(run.steps()) >= 2, "the second step")
        password = address_of(run).password
        commands = run.processes()
        assert len(commands) >= 10  # up, NATS server, supervisor, engine and its server, and six other actors
        assert not [line for line in commands.values() if password in line]
        assert await run.ended() == 0, run.story

    summary = run.summary
    assert_consistent(run, steps=60, warmup_steps=48)
    assert_within_lag(run, max_lag=1)
    assert summary["sampled_reward_first_step"] < 0.5
    assert summary["sampled_reward_best_5_steps"] >= 0.8
    assert 0 <= summary["greedy_accuracy_before"] < summary["greedy_accuracy_after"] <= 1
    assert [(row["version"], row["prompts"]) for row in run.rows("eval")] == [(0, 64), (60, 64)]
    assert summary["evaluated_versions_after"].keys() == {"60"}
    assert (run.root / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert b'id="data">' in (run.root / "report.html").read_bytes()
    assert f"{summary['sampled_reward_last_5_steps']:.3f}" in run.out
    assert run.error == ""
    assert " died" not in run.out
    assert_password_unsaid(run, password)
    assert password not in run.out
    answer = exported_answer(Path(summary["exported_model"]), "^abcd=")
    assert sorted(answer) == sorted("dcba")  # a model of accuracy 0.98 may still get this one's order wrong


def exported_answer(directory: Path, prompt: str) -> str:
    """Return the greedy answers of an exported model, loaded with transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    new = model.generate(ids, max_new_tokens=7, do_sample=False)[0][ids.shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True)).replace(" ", "")


async def test_a_synchronous_config_with_rows_and_a_reward_of_ones_own(tmp_path: Path):
    settings = ["buffer.max_lag=0", "learner.steps=4", "warmup.batch_rows=64", "buffer.batch_groups=8"]
    async with up(tmp_path, *settings, config="custom") as run:
        assert await run.ended() == 0, run.story

    assert_consistent(run, steps=4, warmup_steps=20)
    assert_within_lag(run, max_lag=0)
    assert run.summary["trajectories_issued"] == run.summary["trajectories_trained"] == 4 * 8 * 8
    assert run.summary["masked_stale_tokens"] == 0
    assert run.summary["greedy_accuracy_before"] is None
    assert run.summary["sampled_reward_best_5_steps"] is None  # there are only four


HELD = '''
"""The five turns of the example, once the file `held` is gone, and the gate behind them."""
import asyncio
from pathlib import Path

from five_turns import rollout as five_turns
from gated import pass_gate

HELD = Path(__file__).with_name("held")


async def rollout(row, context):
    while HELD.exists():
        await asyncio.sleep(0.02)
    await five_turns(row, context)
    await pass_gate(context)
'''


async def test_a_fleet_grows_and_shrinks_while_five_turn_trajectories_are_trained(tmp_path: Path):
    shutil.copy(PACKAGE / "examples" / "five_turns.py", tmp_path)
    (tmp_path / "held_turns.py").write_text(HELD)
    (tmp_path / "held").touch()
    gate = closed_gate(tmp_path, 3)
    settings = ["task.rollout=held_turns.py:rollout", "task.options.letters=3", "rollout.max_new_tokens=4"]
    settings += ["engine.groups.near.max_running=64", "engine.groups.far.kind=embedded"]
    async with up(tmp_path, *settings, "learner.steps=8", "buffer.max_lag=2") as run:
        await run.reaches(lambda: run.actor("rollout-1"), "the first rollout worker")
        code, output = await command(tmp_path, "scale", "rollout=2", "reward=2", "engine-near=2")
        assert (code, output) == (0, "scaled: rollout 2, reward 2, engine-near 2\n")
        assert all(run.actor(name) for name in ("rollout-2", "reward-2", "engine-near-2", "engine-far-1"))
        code, output = await command(tmp_path, "scale", "engine=2")
        assert (code, output.count("name one of engine-near, engine-far")) == (2, 1)

        (tmp_path / "held").unlink()
        await run.reaches(lambda: len(run.steps()) >= 2, "the second step")
        code, output = await command(tmp_path, "scale", "rollout=1", "engine-near=0")
        assert (code, output) == (0, "scaled: rollout 1, engine-near 0\n")
        gate.unlink()  # what rollout-2 had behind it was handed back
        assert await run.ended() == 0, run.story

    assert_consistent(run, steps=8, warmup_steps=4)
    assert_within_lag(run, max_lag=2)
    assert len(run.summary["trained_tokens_by_lag"]) > 1  # weights changed while trajectories grew
    turns = run.summary["sampled_tokens"] / run.summary["trajectories_trained"]
    assert turns > 5  # at least a token in each of five turns
    assert run.summary["trajectories_failed"] == 0
    assert " died" not in run.out


async def test_warm_up_alone_is_supervised_training(tmp_path: Path):
    async with up(tmp_path, "learner.steps=0", "eval.prompts=8", "recorder.plot=true") as run:
        assert await run.ended() == 0, run.story

    assert_consistent(run, steps=0, warmup_steps=4)
    losses = [row["loss"] for row in run.rows()]
    assert losses[-1] < losses[0]
    assert run.summary["warmup_tokens"] == 4 * 32 * 5  # four letters and the end
    assert run.summary["trajectories_issued"] == 0
    assert [row["version"] for row in run.rows("eval")] == [0]
    assert (Path(run.summary["exported_model"]) / "config.json").is_file()
    assert "plot" not in run.summary


async def test_conversations_of_a_file_are_trained_before_the_rl_of_a_task(tmp_path: Path):
    made_model(tmp_path / "a-model")
    template = "{% for m in messages %}{{ m.role[0] + '=' + m.content + '<eos>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}a={% endif %}"
    (tmp_path / "a-model" / "chat_template.jinja").write_text(template)
    turns = [("user", "^abc="), ("assistant", "cba"), ("user", "again"), ("assistant", "abc")]
    messages = [{"role": role, "content": content} for role, content in turns]
    flagged = [*messages[:3], {**messages[3], "train": False}]
    lines = [json.dumps({"messages": messages}), json.dumps({"messages": flagged})]
    (tmp_path / "talk.jsonl").write_text("\n".join(lines))
    settings = ["model.path=a-model", "warmup.source=talk.jsonl", "warmup.turns=last", "learner.steps=1"]
    async with up(tmp_path, *settings, "task.options.letters=3", "rollout.max_new_tokens=6", "eval.prompts=0") as run:
        assert await run.ended() == 0, run.story

    assert_consistent(run, steps=1, warmup_steps=4)
    losses = [row["loss"] for row in run.rows() if row["stage"] == "warmup"]
    assert losses[-1] < losses[0]
    # every second row trains abc, every other one cba, each with its end
    assert run.summary["warmup_tokens"] == 4 * 32 * 4
    code, output = await command(tmp_path, "audit", "--deep")
    assert code == 0, output


async def test_a_reasoning_gym_dataset_is_graded_by_its_own_scorer(tmp_path: Path):
    alphabet = json.dumps(string.ascii_letters + " ()-:>")
    settings = ["task.source=reasoning-gym:spell_backward", "task.options={}", "reward.function=reasoning-gym"]
    model = [f"model.create.alphabet={alphabet}", "model.create.context=128", "rollout.max_new_tokens=12"]
    config = 'run = "short"\n[warmup]\nsteps = 4\nbatch_rows = 32\nrows_per_trajectory = 16\n[learner]\nlr = 1e-3\n'
    length = ["warmup.steps=4", "learner.steps=2", "buffer.batch_groups=8"]
    async with up(tmp_path, *settings, *model, *WITHOUT_MODEL, *length, config=config) as run:
        assert await run.ended() == 0, run.story

    assert_consistent(run, steps=2, warmup_steps=4)
    assert run.summary["trajectories_failed"] == 0


# --- kill -9


@asynccontextmanager
async def outliving(server: EmbeddedServer, folder: Path, *settings: str) -> AsyncIterator[tuple[Run, Bus]]:
    """A run on a server of the test's, and a connection to its topics that is there when the run has ended."""
    async with up(folder, *at_server(server, folder), *settings) as run:
        bus = await Bus.connect(server.address, "short", name="test")
        try:
            yield run, bus
        finally:
            await bus.close()


async def test_a_learner_killed_in_the_middle_goes_on_from_its_checkpoint(server: EmbeddedServer, tmp_path: Path):
    settings = ["learner.steps=12", "learner.checkpoint_every=4", GATED]
    gate = closed_gate(tmp_path, 7)
    async with outliving(server, tmp_path, *settings) as (run, bus):
        await run.reaches(lambda: len(run.steps()) >= 6, "the sixth step")
        await run.kill("learner-1")
        gate.unlink()
        assert await run.ended() == 0, run.story

        assert '"event": "checkpoint loaded"' in run.log("learner-1")
        assert_audited(await messages_on(bus, BATCHES), await messages_on(bus, TRAINING), 12)
    assert_consistent(run, steps=12, warmup_steps=4)
    assert_within_lag(run, max_lag=2)
    assert "learner-1 started again" in run.out


async def test_every_other_actor_killed_one_after_another_costs_no_batch(server: EmbeddedServer, tmp_path: Path):
    settings = ["learner.steps=32", "workers.lease_s=1.0", GATED]
    victims = ("rollout-1", "reward-1", "buffer-1", "prompter-1", "engine-1", "recorder-1")
    gate = closed_gate(tmp_path, 0)
    async with outliving(server, tmp_path, *settings) as (run, bus):
        for victim in victims:
            await two_steps_more(run, f"steps before {victim} is killed", gate)
            await run.kill(victim)
        gate.unlink()
        assert await run.ended() == 0, run.story

        batches = await messages_on(bus, BATCHES)
        assert_audited(batches, await messages_on(bus, TRAINING), 32)
    assert_consistent(run, steps=32, warmup_steps=4)
    assert_within_lag(run, max_lag=2)
    assert [victim for victim in victims if f"{victim} started again" not in run.out] == []
    assert run.summary["trajectories_trained"] == sum(len(group.members) for group in trained_groups(batches))


def trained_groups(batches: Messages) -> list[Any]:
    return [group for batch in batches.on(BATCH_PACKED) if batch.stage == "rl" for group in batch.groups]
