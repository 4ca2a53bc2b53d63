"""Configs that load, and the errors of those that do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.algorithms.losses import LOSSES
from asyncrl.cli.main import run
from asyncrl.cli.main import run as run_command
from asyncrl.config.hints import hints
from asyncrl.config.key_lines import key_lines
from asyncrl.config.load import SHIPPED, ConfigError, load_config
from asyncrl.config.paths import expand_paths
from asyncrl.config.reference import documented_tables, known_settings, settings_markdown, settings_text
from asyncrl.run.preflight import check_surroundings
from harness.configs import SOUND, from_settings, problems, the_problem

ROOT = Path(__file__).parents[2]


# What is read


def test_a_config_takes_defaults_for_what_it_leaves_out(written):
    config = load_config(written(SOUND + "[learner]\nlr = 1e-3\n")).config

    assert (config.learner.lr, config.learner.steps, config.buffer.max_lag) == (1e-3, 100, 2)


@pytest.mark.parametrize("name", ["addition", "custom", "demo", "fleet", "one-gpu", "sums", "two-gpus"])
def test_a_shipped_config_is_loaded_by_name_and_finds_its_files_among_the_examples(name):
    loaded = load_config(name)

    assert loaded.config.run == name
    assert loaded.base == ROOT / "asyncrl" / "examples"
    assert loaded.source == SHIPPED[name]


@pytest.mark.parametrize("name", ["addition", "custom", "demo", "one-gpu"])
def test_a_shipped_config_names_only_files_that_are_there_and_needs_no_hint(name):
    assert hints(load_config(name, further=check_surroundings).config) == []


def test_a_config_finds_its_files_beside_itself(written, tmp_path):
    assert load_config(written(SOUND)).base == tmp_path


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("model.path", "./model", "/here/model"),
        ("model.path", "", ""),
        ("model.path", "../base/model", "model"),  # below the config's folder, which other hosts have elsewhere
        ("engine.groups.own.api_key_file", "own.key", "/here/own.key"),
        ("task.source", "rows.jsonl@[0:100]", "/here/rows.jsonl@[0:100]"),
        ("task.source", "reasoning-gym:chain_sum", "reasoning-gym:chain_sum"),
        ("task.options.convert", "mine.py:convert", "/here/mine.py:convert"),
        ("task.options.source", "rows.jsonl", "rows.jsonl"),  # of a source of one's own, which knows what it means
        (
            "warmup",
            {"options": {"my_file": "a", "convert": "m.py:f"}},
            {"options": {"my_file": "a", "convert": "/here/m.py:f"}},
        ),
        ("reward.function", "package.module:reward", "package.module:reward"),
        ("reward.function", "http://localhost:1/score.py", "http://localhost:1/score.py"),
        ("tasks", {"a": {"source": "a.parquet"}}, {"a": {"source": "/here/a.parquet"}}),
        ("learner.filters", ["mine.py:good", "zero_variance"], ["/here/mine.py:good", "zero_variance"]),
        ("learner.columns", {"own": "mine.py:own"}, {"own": "/here/mine.py:own"}),
        ("actors", ["~/mine.py", "package.module"], ["/home/anna/mine.py", "package.module"]),
        ("rollout.stop", ["mine.py"], ["mine.py"]),
        ("directory", "runs", "runs"),
    ],
)
def test_a_path_of_the_command_line_starts_from_the_working_directory(monkeypatch, tmp_path, key, value, expected):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", "/home/anna")

    found = expand_paths(value, key, base=tmp_path / "base")

    assert json.dumps(found).replace(f"{tmp_path}/here", "/here") == json.dumps(expected)


def test_a_path_of_a_file_starts_from_its_folder_wherever_the_command_runs(written, monkeypatch, tmp_path):
    path = written(SOUND + 'task.source = "rows.jsonl"\ntask.options.convert = "~/mine.py:convert"\n')
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    monkeypatch.setenv("HOME", "/home/anna")

    config = load_config(path, overrides=["reward.function=mine.py:reward"]).config

    assert (config.task.source, config.task.options["convert"]) == ("rows.jsonl", "/home/anna/mine.py:convert")
    assert config.reward.function == "other/mine.py:reward"


def test_an_unknown_name_is_answered_with_the_shipped_configs():
    problem = the_problem("demmo")

    assert (
        problem.message
        == "no such file, and the shipped configs are addition, chat, coder, custom, demo, fleet, guess, live-demo, "
        "one-gpu, proposer, self-play, sums, two-gpus; did you mean demo?"
    )


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "config.toml").write_bytes(b"run = '\xff'")

    assert "expected a TOML file in UTF-8" in the_problem(str(tmp_path / "config.toml")).message


def test_an_integer_serves_as_a_number(written):
    assert load_config(written(SOUND + "learner.lr = 1\n")).config.learner.lr == 1.0


# Problems, all at once


def test_every_problem_is_in_one_error_in_the_order_of_lines(written):
    path = written(
        "\n".join(
            [
                'run = "My Run"',
                "[learner]",
                "lr = -1",
                "stepz = 3",
                'loss = "poo"',
                "[rollout]",
                "group_size = 1.5",
                "[warmup]",
                "batch_rows = 100",
            ]
        )
    )

    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides=["buffer.max_lag=soon"])

    losses = ", ".join(f'"{name}"' for name in sorted(LOSSES))
    assert str(caught.value).splitlines() == [
        f'{path}:1: run: found "My Run" (string), expected string matching ^[a-z0-9-]{{1,32}}\\Z',
        f"{path}:3: learner.lr: found -1 (integer), expected number > 0",
        f"{path}:4: learner.stepz: unknown setting; did you mean learner.steps?",
        f'{path}:5: learner.loss: found "poo" (string), expected one of {losses}, "path/to/file.py:name"; '
        'did you mean "ppo"?',
        f"{path}:7: rollout.group_size: found 1.5 (number), expected integer >= 1",
        f"{path}:9: warmup.batch_rows: 32 rows do not divide warmup.batch_rows = 100; "
        "a batch is made of whole trajectories",
        '--set buffer.max_lag: found "soon" (string), expected integer >= 0',
    ]


def test_the_name_of_an_advantage_as_that_of_a_loss_tells_which_setting_has_it(written):
    problem = the_problem(written("[learner]\nloss = 'grpo'\n"))

    assert problem.message.endswith('"grpo" is a value of learner.advantage, see docs/guides/algorithms.md')


def test_what_depends_on_a_wrong_setting_is_not_judged_by_its_default(written):
    problem = the_problem(written(SOUND + "learner.keep_versions = 3\nbuffer.max_lag = -1\n"))

    assert problem.key == "buffer.max_lag"


def test_nor_what_depends_on_a_misspelt_table(written):
    assert the_problem(written("[rolout]\nmax_new_tokens = 11\n")).message == "unknown setting; did you mean rollout?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learner.steps = true", "found true (boolean), expected integer >= 0"),
        ('learner.lr = "1e-3"', 'found "1e-3" (string), expected number > 0'),
        ("learner.lr = nan", "found NaN (number), expected number > 0"),
        ("learner.betas = [0.9]", "found [0.9] (array), expected array of 2 numbers each >= 0 and <= 1"),
        ("learner = 3", "found 3 (integer), expected table of settings, [learner]"),
        ("[[learner]]", "found [{}] (array), expected table of settings, [learner]"),
        ("eval.pass_at = [0]", "found [0] (array), expected array of integers each >= 1"),
        ("warmup.roles = []", "found [] (array), expected array of 1 or more strings"),
        ('rollout.stop = "x"', 'found "x" (string), expected array of strings'),
        ("rollout.top_p = 0.0", "found 0.0 (number), expected number > 0 and <= 1"),
        ("recorder.plot = 1", "found 1 (integer), expected boolean"),
        ("task.options = 1", "found 1 (integer), expected table"),
        (r'run = "a\n"', r'found "a\n" (string), expected string matching ^[a-z0-9-]{1,32}\Z'),
        ("run = 2026-01-01", 'found "2026-01-01" (date), expected string matching ^[a-z0-9-]{1,32}\\Z'),
    ],
)
def test_a_wrong_value_is_answered_with_what_was_found_and_expected(written, text, expected):
    problem = next(problem for problem in problems(written(text)) if problem.line == 1)

    assert problem.message == expected


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learner.stepps", "did you mean learner.steps?"),
        ("learner.max_lag", "did you mean buffer.max_lag?"),
        ("lr", "did you mean learner.lr?"),
        ("learnr.lr", "did you mean learner?"),
        ("learner.max_lagg", "did you mean buffer.max_lag?"),
        ("rollout.temp", "did you mean rollout.temperature?"),
        ("rollout.model", "expected one of "),  # several other tables have one
        ("learner.lrate", "did you mean learner.lr?"),
        ("recorder.zzzzzz", "expected one of plot, report, samples, samples_mb"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_known_one(written, key, meant):
    assert the_problem(written(SOUND + f"{key} = 1\n")).message.startswith(f"unknown setting; {meant}")


def test_options_of_the_task_are_free(written):
    config = load_config(written(SOUND + "[task.options]\nletters = 4\nmore.depth = 1\n")).config

    assert config.task.options == {"letters": 4, "more": {"depth": 1}}


# Syntax


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[learner]\nlr = 1e\nstepz = 3\n", 2),
        ("run = 'a'\n[learner\nlr = 1\n", 2),
        ("[learner]\nlr = 1\n[learner]\n", 3),
        ("[learner]\nlr = 1\nlr = 2\n", 3),
        ("[rollout]\nstop = [\n'a',\n", 3),
        ('seed = 1\nrun = """\nabc\n', 3),
        ("just words\n", 1),
    ],
)
def test_the_first_syntax_error_is_reported_with_its_line(written, text, line):
    problem = the_problem(written(text))

    assert (problem.line, problem.key) == (line, "")
    assert problem.message.startswith("not valid TOML: ")
    assert problem.message.endswith(f": {text.splitlines()[line - 1]}")


def test_every_key_has_the_line_on_which_its_statement_begins():
    text = (
        '# c\na.b = 1\n\n[t]  # x\nlist = [\n  "[no]",\n]\ntext = """\nz = 1\n"""\nin = {c = {d = 2}}\n[t.u]\n"q" = 1\n'
    )

    assert key_lines(text) == {
        "a": 2,
        "a.b": 2,
        "t": 4,
        "t.list": 5,
        "t.text": 8,
        "t.in": 11,
        "t.in.c": 11,
        "t.in.c.d": 11,
        "t.u": 12,
        "t.u.q": 13,
    }


# --set


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("learner.lr=1e-5", "lr", 1e-5),
        ("learner.device=cuda:1", "device", "cuda:1"),
        ('learner.device="cuda"', "device", "cuda"),
        ("learner.betas=[0.5, 0.6]", "betas", (0.5, 0.6)),
        (" learner.steps = 7", "steps", 7),
    ],
)
def test_an_override_is_read_as_toml_and_else_as_plain_text(override, key, value):
    assert getattr(from_settings(override).config.learner, key) == value


@pytest.mark.parametrize("text", ["42", "nan", "true", "1979-05-27", '"42"'])
def test_an_override_of_a_text_is_text_whatever_it_would_be_in_toml(text):
    assert from_settings(f"run={text}").config.run == text.strip('"')


def test_an_override_wins_over_the_file_and_the_last_over_the_first(written):
    loaded = load_config(written(SOUND + "seed = 1\n"), overrides=["seed=2", "seed=3"])

    assert loaded.config.seed == 3


def test_an_override_may_name_a_table_the_file_leaves_out(written):
    assert load_config(written(SOUND), overrides=["task.options.letters=3"]).config.task.options == {"letters": 3}


@pytest.mark.parametrize(
    ("override", "key", "message"),
    [
        ("learner.lr", "--set learner.lr", "expected KEY=VALUE, such as learner.lr=1e-5"),
        ("learner..lr=1", "--set learner..lr=1", "expected KEY=VALUE, such as learner.lr=1e-5"),
        ("learner.lrr=1", "--set learner.lrr", "unknown setting; did you mean learner.lr?"),
        ("lerner.lr=1", "--set lerner.lr", "unknown setting; did you mean learner?"),
        ("learner.lr=0", "--set learner.lr", "found 0 (integer), expected number > 0"),
        ("run.x=1", "--set run.x", "run is not a table in the config"),
        ("learner={lr=0}", "--set learner.lr", "found 0 (integer), expected number > 0"),
    ],
)
def test_a_problem_of_an_override_names_the_override(override, key, message):
    problem = the_problem("demo", override)

    assert (problem.line, problem.key, problem.message) == (None, key, message)
    assert problem.text("demo.toml") == f"{key}: {message}"


def test_a_value_cannot_smuggle_in_a_second_setting():
    assert the_problem("demo", "seed=1\nrun='x'").key == "--set seed"


# Commands


def test_check_prints_ok_and_hints(capsys):
    assert run(["check", "demo", "--set", "rollout.slots=256"]) == 0
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert words == ["ok", "hint:", "256", "streams"]


def test_check_prints_all_problems_with_their_lines_and_fails(capsys, written):
    path = written(SOUND + "learner.lr = 0\nlearner.stepz = 1\n")

    assert run(["check", path, "--set", "seed=x"]) == 1
    assert [line.split(": ")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"{path}:2",
        f"{path}:3",
        "--set seed",
    ]


def test_check_looks_at_files(capsys):
    assert run(["check", "demo", "--set", "task.source=none.jsonl"]) == 1
    assert capsys.readouterr().err.startswith("--set task.source: ")


def test_settings_are_printed_with_type_range_default_unit_and_meaning(capsys):
    assert run(["settings"]) == 0

    assert (
        "  workers.lease_s = 10.0 s  (number > 0)\n      Seconds after which the work of a silent worker passes on.\n"
    ) in capsys.readouterr().out


def test_settings_are_printed_as_json(capsys):
    run(["settings", "--json"])

    tables = {table["key"]: table for table in json.loads(capsys.readouterr().out)}
    assert tables["buffer"]["settings"][1] == {
        "key": "buffer.max_lag",
        "type": "integer",
        "range": ">= 0",
        "default": 2,
        "unit": "versions",
        "doc": "Versions between the weights that sampled a token and those it updates; no trained token exceeds it.",
    }


def test_the_settings_page_is_fresh(capsys):
    run(["settings", "--markdown"])

    assert (ROOT / "docs" / "reference" / "settings.md").read_text() == capsys.readouterr().out, (
        "write it anew: asyncrl settings --markdown > docs/reference/settings.md"
    )


def test_every_setting_and_table_has_a_sentence():
    assert all(table.doc and all(setting.doc for setting in table.settings) for table in documented_tables())
    text, markdown = settings_text(), settings_markdown()
    assert all(key in text and key in markdown for key in known_settings())


def test_settings_are_shown_by_the_beginning_of_their_keys(capsys):
    assert run_command(["settings", "learner.lr"]) == 0
    shown = capsys.readouterr().out
    assert "learner.lr = " in shown
    assert "buffer.max_lag" not in shown
    assert run_command(["settings", "learnr"]) == 2
    assert "no setting has 'learnr' in its name" in capsys.readouterr().err


def test_or_by_a_part_of_them_where_none_begins_so(capsys):
    assert run_command(["settings", "max_lag"]) == 0
    shown = capsys.readouterr().out
    assert "buffer.max_lag = " in shown
    assert "buffer.batch_groups" not in shown


def test_settings_of_benchmarks_can_be_set_and_are_in_no_reference(written):
    config = load_config(written(SOUND), overrides=["engine.scripted_tokens=3", "learner.scripted_step_s=0.5"]).config

    assert (config.engine.scripted_tokens, config.learner.scripted_step_s) == (3, 0.5)
    assert "scripted" not in settings_markdown()
