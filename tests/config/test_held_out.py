"""Held-out sets: what is left out of `[eval.sets.NAME]` is as in `[eval]`, `[task]` and `[reward]`."""

from pathlib import Path

import pytest

from asyncrl.config.held_out import graded_tasks, held_out_rows, held_out_sets, set_of
from asyncrl.config.load import ConfigError, load_config
from asyncrl.config.pools import purpose_of, serves_clients
from asyncrl.config.settings import Config
from asyncrl.data.sources import open_rows

SETS = """
[eval]
prompts = 8
temperature = 0.7
samples = 4
pass_at = [1, 4]

[eval.sets.words]
source = "reverse"

[eval.sets.sums]
source = "sum"
prompts = 16
samples = 1
pass_at = []
max_new_tokens = 5
reward = "math"
"""


@pytest.fixture
def load(tmp_path: Path):
    def loaded(text: str, *overrides: str) -> Config:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return load_config(str(path), overrides=list(overrides)).config

    return loaded


def test_a_set_takes_what_it_does_not_say_from_the_tables_of_the_run(load):
    config = load(SETS)
    words, sums = held_out_sets(config).values()

    assert (words.name, words.members, words.temperature, words.pass_at) == ("words", 32, 0.7, [1, 4])
    assert (sums.name, sums.members, sums.temperature, sums.pass_at) == ("sums", 16, 0.7, [])
    assert (words.max_new_tokens, sums.max_new_tokens) == (config.rollout.max_new_tokens, 5)
    assert {name: task.reward for name, task in graded_tasks(config).items()} == {
        "task": "exact",
        "words": "exact",
        "sums": "math",
    }
    assert [part.spec for part in held_out_rows(config, Path(), "sums").parts] == ["sum"]


def test_one_set_has_no_name_and_the_tasks_of_the_run(load):
    config = load("[eval]\nprompts = 3\n")
    sets = held_out_sets(config)

    assert [(name, held_out.members, held_out.data) for name, held_out in sets.items()] == [("", 3, "held-out")]
    assert set_of(sets, "task") is set_of(sets, "words") is sets[""]
    assert held_out_sets(Config()) == {}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("eval.pass_at=[8]", "pass@8 needs as many answers of a prompt, and eval.sets.words.samples = 4"),
        ("eval.pass_at=[2, 2]", "expected each number once"),
        ("eval.temperature=0", "4 answers at temperature 0 are all equal; raise eval.sets.words.temperature"),
        ("eval.prompts=0", "eval.sets.words has no prompts: eval.prompts is 0"),
        ("eval.samples=65536", "524288 trajectories; an evaluation has 65536 at most"),
        ("eval.sets.words.max_new_tokens=512", "512 new tokens leave no room for a prompt in a context of 512"),
        ("weights.gate_metric=accuracy", "expected the held-out set that is judged; there is words, sums"),
        ("tasks.words.source=sum", "words is the name of a task and of a held-out set"),
    ],
)
def test_sets_that_cannot_be_evaluated_are_refused(load, override, words):
    with pytest.raises(ConfigError) as refused:
        load(SETS, override)
    assert words in str(refused.value)


OWN = SETS + '[engine.groups.train]\nkind = "embedded"\n[engine.groups.held]\nkind = "embedded"\n'


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["eval.engines=other"], "expected the name of a group of engine.groups; there is train, held"),
        (["eval.engines=held", "engine.groups.held.kind=external"], "engine.groups.held has no engine"),
        (["eval.engines=held", "engine.groups.train.kind=external"], "no other group has an engine for training"),
        (["eval.engines=held", "eval.deadline_s=120"], "is not above engine.update_deadline_s = 120 s"),
        (
            ["eval.engines=held", "eval.every=3", "learner.publish_every=2"],
            "set a multiple of learner.publish_every = 2",
        ),
        (
            ["eval.engines=held", "eval.prompts=0", "eval.sets.words.prompts=0", "eval.sets.sums.prompts=0"],
            "serves evaluations, but eval.prompts = 0 makes none",
        ),
    ],
)
def test_engines_of_evaluations_that_could_answer_none_are_refused(load, overrides, words):
    with pytest.raises(ConfigError) as refused:
        load(OWN, *overrides)
    assert words in str(refused.value)
    assert purpose_of(load(OWN, "eval.engines=held"), "engine-held") == "evaluations"


def test_engines_that_no_client_waits_for_give_way(load):
    training = load(OWN, "eval.engines=held", "gateway.count=1")
    live = load(OWN, "gateway.engines=held", "gateway.count=1")

    assert [serves_clients(training, name) for name in ("engine-train-1", "engine-held-1")] == [True, False]
    assert [serves_clients(live, name) for name in ("engine-train-1", "engine-held-1")] == [False, True]
    assert all(serves_clients(live, name) for name in ("gateway-1", "supervisor-1", "users-1"))
    assert not any(serves_clients(live, name) for name in ("learner-1", "judge-2"))


def test_a_gate_judges_a_metric_that_its_set_has(load):
    gate = ["weights.gate_set=words", "weights.gate_metric=pass@4"]
    assert load(SETS, *gate).weights.gate_set == "words"
    with pytest.raises(ConfigError, match="makes pass@1, pass@4; add it there"):
        load(SETS, gate[0], "weights.gate_metric=pass@2")


RISING = """
[task]
source = "reverse"
curriculum = { option = "letters", first = 2, last = 6 }
[eval]
prompts = 4
"""


def test_held_out_rows_are_of_the_last_level_unless_their_set_chooses(load, tmp_path: Path):
    config = load(RISING + "[eval.sets.easy]\noptions = { letters = 3 }\n[eval.sets.hard]\n")
    rows = {name: open_rows(held_out_rows(config, tmp_path, name)).row(0) for name in ("easy", "hard")}

    assert [len(rows[name].label) for name in ("easy", "hard")] == [3, 6]
    assert rows["hard"].metadata == {"difficulty": 6}  # as rewards of the task read it
    alone = open_rows(held_out_rows(load(RISING), tmp_path, "")).row(0)
    assert (len(alone.label), alone.metadata) == (6, {"difficulty": 6})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[tasks.a]\nsource = "sum"\n[eval]\nprompts = 4\n[eval.sets.mine]\nsamples = 1\n', "mine has no source"),
        (
            '[tasks.a]\nsource = "sum"\neval_source = "sum"\n[eval]\nprompts = 4\n[eval.sets.b]\nsource = "sum"\n',
            "tasks.a.eval_source is not evaluated",
        ),
    ],
)
def test_what_sets_and_several_tasks_leave_open_is_refused(load, text, words):
    with pytest.raises(ConfigError, match=words):
        load(text)
