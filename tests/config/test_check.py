"""Which settings cannot hold together, and which files must be there."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext

import pytest

from asyncrl.config.check import contradictions
from asyncrl.config.load import ConfigError, load_config
from asyncrl.config.settings import Config
from asyncrl.data.sources import open_source
from asyncrl.run.preflight import check_surroundings
from harness.configs import SOUND, from_settings, made_model, problems, the_problem

# Contradictions

TOURNAMENT = ["reward.scope=group", "reward.tournament=swiss", "reward.function=a.py:b", "eval.prompts=0"]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["live.fraction=0.5"], "live.fraction gateway.count"),
        (["rollout.group_size=1"], "rollout.group_size learner.advantage learner.loss"),
        (["rollout.group_size=1", "learner.advantage=centered"], "rollout.group_size learner.advantage learner.loss"),
        (
            ["rollout.group_size=1", "learner.advantage=none", "learner.filters=['zero_variance']"],
            "learner.filters rollout.group_size",
        ),
        (
            ["rollout.temperature=0"],
            "rollout.temperature rollout.group_size learner.advantage learner.loss",
        ),
        (["rollout.temperature=0", "learner.advantage=none", "rollout.group_size=1"], "rollout.temperature"),
        (["rollout.top_k=1"], "rollout.top_k rollout.group_size learner.advantage learner.loss"),
        (["rollout.slots=4"], "rollout.group_size rollout.slots rollout.workers"),
        (["rollout.top_k=0"], "rollout.top_k"),
        (["rollout.stop=['']"], "rollout.stop"),
        (["rollout.stop=['a', 'b', 'a']"], "rollout.stop"),
        (["workers.lease_s=120"], "workers.lease_s workers.stall_s"),
        (["workers.lease_s=0.01"], "workers.lease_s"),
        (["reward.function=math", "reward.time_limit_s=600"], "reward.time_limit_s buffer.group_deadline_s"),
        (["task.rollout=my.py:f", "rollout.tool_limit_s=600"], "rollout.tool_limit_s buffer.group_deadline_s"),
        (["supervision.silence_s=0.1"], "supervision.silence_s"),
        (["nats.replicas=3"], "nats.replicas nats.url"),
        (["warmup.rows_per_trajectory=30"], "warmup.rows_per_trajectory warmup.batch_rows"),
        (["model.create.kv_heads=3", "model.create.heads=4"], "model.create.kv_heads model.create.heads"),
        (["model.create.head_dim=31"], "model.create.head_dim"),
        (["model.create.alphabet=abca"], "model.create.alphabet"),
        (["model.create.alphabet="], "model.create.alphabet"),
        (["rollout.max_new_tokens=512"], "rollout.max_new_tokens model.create.context"),
        (["engine.context=11"], "rollout.max_new_tokens engine.context"),
        (["engine.context=513"], "engine.context model.create.context"),
        (["buffer.max_lag=0", "buffer.max_batches_ahead=1"], "buffer.max_batches_ahead buffer.max_lag"),
        (["eval.prompts=0", "weights.gate_metric=accuracy"], "weights.gate_metric eval.prompts"),
        (["buffer.max_lag=3"], "learner.keep_versions buffer.max_lag"),
        (["learner.publish_every=4"], "learner.publish_every buffer.max_lag"),
        (["learner.filter_options.pass_rate.above=0.1"], "learner.filter_options.pass_rate.above learner.filters"),
        (
            [
                "learner.filters=['pass_rate']",
                "learner.filter_options.pass_rate.above=0.5",
                "learner.filter_options.pass_rate.below=0.5",
            ],
            "learner.filter_options.pass_rate.above learner.filter_options.pass_rate.below",
        ),
        (
            ["learner.filters=['length']", "learner.filter_options.length.most_tokens=1"],
            "learner.filter_options.length.most_tokens learner.filter_options.length.least_tokens",
        ),
        (
            ["rollout.group_size=1", "learner.advantage=none", "learner.filters=['pass_rate']"],
            "learner.filters rollout.group_size",
        ),
        (["task.curriculum.last=9"], "task.curriculum.last task.curriculum.option"),
        (
            ["task.curriculum.option=digits", "task.curriculum.first=9", "task.curriculum.last=9"],
            "task.curriculum.last task.curriculum.first task.curriculum.option",
        ),
        (
            ["task.curriculum.option=letters", "task.curriculum.last=9", "task.options={letters=3}"],
            "task.options task.curriculum.option",
        ),
        (["reward.scope=group"], "reward.function reward.scope"),
        (["reward.scope=group", "reward.function=a.py:b", "buffer.stale=reissue"], "buffer.stale reward.scope"),
        (["learner.turn_discount=0.5"], "learner.turn_discount learner.advantage"),
        (["reward.tournament=swiss", "reward.function=a.py:b"], "reward.tournament reward.scope"),
        ([*TOURNAMENT, "rollout.group_size=1", "learner.advantage=none"], "reward.tournament rollout.group_size"),
        ([*TOURNAMENT, "eval.prompts=4"], "reward.tournament eval.samples"),
        ([*TOURNAMENT, "reward.tournament_limit_s=600"], "reward.tournament_limit_s buffer.group_deadline_s"),
        (["reward.overlong.longest_tokens=9"], "reward.overlong.longest_tokens reward.overlong.penalty"),
        (
            ["reward.overlong.penalty=1"],
            "reward.overlong.interval_tokens reward.overlong.longest_tokens reward.overlong.penalty",
        ),
        (["learner.filter_options.garbage.most=2"], "learner.filter_options.garbage.most"),
        (["learner.loss_options.clip_low=0.1"], "learner.loss_options.clip_low"),
        (["learner.loss=ppo", "learner.loss_options.clip_low=2"], "learner.loss_options.clip_low"),
        (["learner.loss=ppo", "learner.loss_options.dual_clip=1"], "learner.loss_options.dual_clip"),
        (["learner.loss=ppo", "learner.loss_options.masks=['lag']"], "learner.loss_options.masks"),
        (["learner.loss=ppo", "learner.loss_options.opsm_cap=0.1"], "learner.loss_options.opsm_cap"),
        (["learner.loss=ppo", "learner.loss_options.kl_unbiased=true"], "learner.loss_options.kl_unbiased"),
        (
            ["learner.loss_options.correction=none", "learner.loss_options.correction_cap=3"],
            "learner.loss_options.correction_cap",
        ),
        (["learner.loss=ppo", "learner.loss_options.correction_cap=3"], "learner.loss_options.correction_cap"),
        (["learner.loss_options.correction_cap=0"], "learner.loss_options.correction_cap"),
        (["learner.betas=[0.9, 1]"], "learner.betas"),
        (["learner.device=gpu"], "learner.device"),
        (["learner.advantage=zero"], "learner.advantage learner.teacher.model"),
        (["learner.lora.rank=4", "learner.lora.targets=['w-q']"], "learner.lora.targets"),
        (["reward.function="], "reward.function task.rollout"),
        (["engine.addresses=['http://a:1']"], "engine.addresses engine.kind"),
        (["weights.transport=nccl", "engine.kind=sglang", "engine.gpus=[1]"], "weights.transport learner.device"),
        (
            ["engine.staged=always", "engine.kind=external", "engine.addresses=['http://a:1']"],
            "engine.staged engine.kind",
        ),
        (["engine.staged=always", "engine.kind=sglang", "engine.arguments=['--tp=2']"], "engine.staged engine.kind"),
        (["weights.transport=gloo", "engine.kind=sglang"], "engine.kind weights.transport learner.device"),
        (["weights.transport=ipc", "learner.device=cuda"], "engine.kind weights.transport learner.device"),
        (
            ["weights.transport=ipc", "engine.kind=external", "engine.addresses=['http://a:1']"],
            "engine.addresses weights.transport",
        ),
        (
            ["weights.transport=ipc", "learner.device=cuda", "engine.kind=sglang", "engine.arguments=['--dp-size=2']"],
            "engine.arguments weights.transport",
        ),
        (
            ["weights.transport=ipc", "learner.device=cuda", "engine.kind=sglang", "engine.gpus=[1]"],
            "engine.gpus weights.transport",
        ),
        (
            ["weights.transport=nccl", "learner.device=cuda:1", "engine.kind=sglang", "engine.gpus=[1]"],
            "engine.gpus weights.transport",
        ),
        (["engine.kind=external", "engine.addresses=['a:1']"], "engine.addresses"),
        (["engine.kind=external", "engine.addresses=['http://a:x']"], "engine.addresses"),
        (["engine.kind=external", "engine.addresses=['http://a:1', 'http://a:1/']"], "engine.addresses"),
        (
            ["engine.kind=external", "engine.addresses=['http://a:1']", "engine.arguments=['-v']"],
            "engine.arguments engine.kind",
        ),
        (["engine.gpus=[0, 1, 2]", "engine.count=2"], "engine.gpus engine.count"),
        (["engine.gpus=[0, 0]"], "engine.gpus engine.count"),
        (["engine.groups.a.kind=embedded", "engine.count=2"], "engine.count engine.groups"),
        (["engine.groups.a.addresses=['http://a:1']"], "engine.groups.a.addresses engine.groups.a.kind"),
        (
            ["engine.groups.a.kind=scripted", "engine.groups.b.kind=embedded"],
            "engine.groups.a.kind engine.groups.b.kind",
        ),
        (["eval.prompts=0", "eval.every=5"], "eval.every eval.prompts"),
        (["eval.prompts=0", "eval.source=sum"], "eval.source eval.prompts"),
        (["reward.function=reasoning-gym"], "reward.function task.source"),
        (["nats.url=localhost:4222"], "nats.url"),
        (["nats.url=nats://[::1"], "nats.url"),
        (["nats.url=nats://me:secret@host:4222"], "nats.url"),
        (["nats.url=nats://host:4222", "nats.user=me"], "nats.user nats.password_file"),
        (["nats.url=nats://host:4222", "nats.password_file=p"], "nats.password_file nats.user"),
        (["nats.user=me", "nats.password_file=p"], "nats.user nats.url"),
        (["nats.nkey_file=seed"], "nats.nkey_file nats.url"),
        (["nats.credentials=users"], "nats.credentials nats.url"),
        (["nats.url=tls://host:1", "nats.nkey_file=seed", "nats.credentials=users"], "nats.nkey_file nats.credentials"),
        (["nats.url=nats://host:4222", "nats.tls_ca=ca.pem"], "nats.tls_ca nats.url"),
        (["nats.url=tls://host:4222", "nats.tls_cert=me.pem"], "nats.tls_cert nats.tls_key"),
        (["nats.url=tls://host:4222", "nats.tls_key=me.key"], "nats.tls_key nats.tls_cert"),
    ],
)
def test_settings_that_cannot_hold_together_are_refused_at_the_override_if_one_is_to_blame(overrides, keys):
    overridden = [override.partition("=")[0] for override in overrides]

    problem = the_problem("demo", *overrides)

    assert problem.key == f"--set {next(key for key in keys.split() if key in overridden)}"


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.group_size=1", "learner.advantage=none"],
        ["learner.advantage=zero", "learner.teacher.model=elsewhere", "rollout.group_size=1"],
        ["learner.trainer=scripted"],
        ["engine.kind=scripted", "learner.trainer=scripted"],
        ["engine.kind=scripted"],
        ["engine.kind=external"],
        ["engine.groups.a.count=2", "engine.groups.b.kind=external", "engine.groups.b.addresses=['http://a:1']"],
        ["engine.kind=external", "engine.addresses=['http://a:1', 'https://b']"],
        ["learner.publish_every=2"],
        ["learner.loss=ppo", "learner.loss_options.clip_low=0.1", "learner.loss_options.clip_high=0.5"],
        ["learner.loss_options.correction_cap=3", "learner.loss_options.correction=mask"],
        ["learner.loss_options.proximal=interpolated", "learner.loss_options.clip_low=0.1"],
        ["learner.loss=gspo", "learner.loss_options.masks=['opsm']", "learner.loss_options.opsm_cap=0.1"],
        ["learner.steps=0", "rollout.temperature=0"],
        ["buffer.max_lag=0", "learner.keep_versions=2"],
        ["model.path=somewhere", "rollout.max_new_tokens=5000"],
        ["nats.url=tls://host:4222", "nats.user=me", "nats.password_file=p"],
        ["nats.url=tls://host:4222", "nats.credentials=users", "nats.tls_ca=ca.pem"],
    ],
)
def test_settings_that_only_look_odd_are_allowed(overrides):
    assert contradictions(from_settings(*overrides).config) == []


def test_a_contradiction_names_both_values_and_what_to_do():
    problem = the_problem("demo", "rollout.group_size=1")

    assert problem.message == (
        'learner.advantage = "grpo" compares the members of a group, but rollout.group_size = 1; '
        'raise it to 2 or more, or set learner.advantage = "none"'
    )


def test_the_defaults_do_not_contradict_each_other():
    assert contradictions(Config()) == []


# Files


def test_files_are_only_looked_at_when_asked(written):
    path = written(SOUND + 'task.source = "none.jsonl"\nreward.function = "none.py:f"\n')

    load_config(path)

    assert [problem.line for problem in problems(path, files=True)] == [2, 3]


def test_every_missing_file_is_reported_with_the_problems_of_settings(written):
    found = problems(
        written(
            "rollout.max_new_tokens = 0\n"
            'model.path = "no-model"\n'
            'reward.function = "none.py:reward"\n'
            'task.rollout = "package.that.is.not:rollout"\n'
            'task.source = "none.jsonl"\n'
            'engine.api_key_file = "no-key"\n'
            'nats = { url = "nats://h:1", user = "me", password_file = "no-password" }\n'
        ),
        files=True,
    )

    assert [(problem.line, problem.key) for problem in found] == [
        (1, "rollout.max_new_tokens"),
        (2, "model.path"),
        (3, "reward.function"),
        (4, "task.rollout"),
        (5, "task.source"),
        (6, "engine.api_key_file"),
        (7, "nats.password_file"),
    ]


def test_files_beside_the_config_are_found(written, tmp_path):
    (tmp_path / "my.py").write_text("print('loud')\ndef reward(completion): return 1.0\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    text = SOUND + 'task.source = "rows.jsonl"\nreward.function = "my.py:reward"\n'

    assert load_config(written(text), further=check_surroundings).config.reward.function == "my.py:reward"


@pytest.mark.parametrize(
    ("source", "steps", "problem"),
    [
        ("rows.jsonl", 5, ""),
        ("rows.jsonl", 6, "2 epochs of 5 rows fill 5 batches of 2 groups, learner.steps is 6; raise"),
        ("reverse", 5, "task.epochs = 2 needs a file: reverse: 8 letters"),
    ],
)
def test_epochs_must_be_enough_for_all_steps(written, tmp_path, source, steps, problem):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n' * 5)
    text = f'task.source = "{source}"\ntask.epochs = 2\nlearner.steps = {steps}\nbuffer.batch_groups = 2\n'

    with pytest.raises(ConfigError, match=f"task.epochs: {re.escape(problem)}") if problem else nullcontext():
        load_config(written(text), further=check_surroundings)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def rewrad(): ...", "my.py has no function 'reward'; it has rewrad"),
        ("import sys; sys.exit()", "SystemExit"),
        ("raise SystemExit('no licence')", "no licence"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_user_function_that_cannot_be_loaded_is_reported_and_harms_nothing(written, tmp_path, code, message):
    (tmp_path / "my.py").write_text(code)

    problem = the_problem(written(SOUND + 'reward.function = "my.py:reward"\n'), files=True)

    assert problem.key == "reward.function"
    assert message in problem.message


@pytest.fixture
def model(tmp_path):
    """A model directory with a context of 100 tokens, one for each letter, and no chat template."""
    made_model(tmp_path)


def test_a_request_must_fit_the_context_of_the_named_model(model, written, tmp_path):
    path = written("model.path = '.'\nrollout.max_new_tokens = 99\n")

    assert load_config(path, further=check_surroundings).base == tmp_path
    assert the_problem(path, "rollout.max_new_tokens=100", files=True).key == "--set rollout.max_new_tokens"


def test_a_prompt_longer_than_the_context_is_named(model, written, tmp_path):
    rows = [{"prompt": "a" * length, "label": "a"} for length in (3, 150)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = written("model.path = '.'\nrollout.max_new_tokens = 9\ntask.source = 'rows.jsonl'\n")

    problem = the_problem(path, files=True)

    assert problem.key == "task.source"
    assert "150 tokens" in problem.message


@pytest.mark.parametrize(
    ("steps", "finding"), [(0, ""), (1, "supervised row 'aaa' has 101 tokens and at most 100 fit")]
)
def test_the_longest_rows_of_a_file_are_read_wherever_they_stand(model, written, tmp_path, steps, finding):
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = [{"prompt": "aaa", "label": "a" * (97 if number == 2500 else 9)} for number in range(3000)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f"model.path = '.'\nrollout.max_new_tokens = 9\ntask.source = 'rows.jsonl'\nwarmup.steps = {steps}\n"
    source = open_source("rows.jsonl", options={}, seed=1, base=tmp_path)
    assert all(len(source.row(place).label) == 9 for place in range(1000))  # not among the first thousand

    with pytest.raises(ConfigError, match=finding) if finding else nullcontext():
        load_config(written(text), further=check_surroundings)


def test_chat_rows_need_a_chat_template(model, written, tmp_path):
    row = {"prompt": [{"role": "user", "content": "aa"}], "label": "a"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    path = written("model.path = '.'\nrollout.max_new_tokens = 9\ntask.source = 'rows.jsonl'\n")

    assert "has no chat template" in the_problem(path, files=True).message


def test_a_misspelt_reward_is_answered_with_the_nearest():
    assert the_problem("demo", "reward.function=exat", files=True).message == (
        'found "exat", expected exact, math, dapo, last_number, deepscaler, f1, gpqa, boxed_math, boxed_f1, '
        "boxed_gpqa, ifbench, ifeval, reasoning-gym, verifiers, random, http://host:port/path, "
        "path/to/file.py:function or package.module:function; did you mean exact?"
    )


def test_an_unknown_option_of_the_source_is_refused_at_its_line(written):
    problem = the_problem(written(SOUND + "[task]\noptions = { leters = 8 }\n"), files=True)

    assert (problem.line, problem.key) == (3, "task.options")


@pytest.mark.parametrize(
    ("key", "found"),
    [("credentials", "operator.json"), ("nkey_file", "holds no nkey seed"), ("tls_ca", "holds no certificates")],
)
def test_a_login_that_cannot_be_used_is_refused_at_its_setting(key, found):
    problem = the_problem("demo", "nats.url=tls://host:4222", f"nats.{key}=nowhere", files=True)

    assert problem.key == f"--set nats.{key}"
    assert found in problem.message


def test_an_empty_password_file_is_refused(written, tmp_path):
    (tmp_path / "key").write_text("\n")

    assert "found nothing" in the_problem(written(SOUND + 'engine.api_key_file = "key"\n'), files=True).message


def test_a_run_directory_that_cannot_be_made_is_refused(written, tmp_path):
    (tmp_path / "file").write_text("")

    problem = the_problem(written(SOUND + f"directory = '{tmp_path}/file/runs'\n"), files=True)

    assert (problem.line, problem.key) == (2, "directory")


def test_a_made_model_must_know_the_characters_of_the_task(written):
    assert (
        'lacks "+"'
        in the_problem(
            written(SOUND + 'task.source = "sum"\nmodel.create.alphabet = "0123456789=^"\n'), files=True
        ).message
    )


def test_a_made_model_must_have_room_for_prompt_and_answer():
    problem = the_problem("demo", "task.options.letters=60", files=True)

    assert "which takes 123 tokens with its answer, but model.create.context = 64" in problem.message
