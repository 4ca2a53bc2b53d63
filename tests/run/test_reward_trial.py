"""`asyncrl check` calls each reward of the user once."""

from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.run.reward_trial import label_faults, label_hints, reward_lines

REWARDS = """
def exact(completion, label):
    return float(completion == label)

def raises(completion, label):
    raise ValueError("no such unit")

def half(completion):
    return [1.0, None]
"""
CONFIG = """
run = "tried"
[tasks.good]
source = "reverse"
reward = "own.py:exact"
[tasks.same]
source = "sum"
reward = "own.py:exact"
[tasks.bad]
source = "reverse"
reward = "own.py:raises"
[tasks.whole]
source = "reverse"
reward = "own.py:half"
reward_scope = "group"
[tasks.named]
source = "sum"
"""


def test_each_function_is_called_once_and_what_it_gives_is_told(tmp_path: Path):
    (tmp_path / "own.py").write_text(REWARDS)
    (tmp_path / "run.toml").write_text(CONFIG)
    loaded = load_config(str(tmp_path / "run.toml"))

    good, bad, whole = reward_lines(loaded.config, loaded.base)

    assert good.startswith("the reward own.py:exact, called with the label '")
    assert good.endswith("' of the first row that is issued as completion, gives 1")
    assert bad.startswith("hint: the reward own.py:raises")
    assert bad.endswith("gives none: ValueError: no such unit")
    assert whole.startswith("hint: the reward own.py:half")
    assert "None; expected a number" in whole


def test_a_label_that_no_answer_can_equal_is_told_where_text_is_compared_exactly(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "a", "label": "abcdefg"}\n{"prompt": "^b=", "label": "abcdefghij"}\n{"prompt": "c", "label": "a"}\n'
    )
    words = ["task.source=rows.jsonl", "rollout.max_new_tokens=8"]
    (tmp_path / "run.toml").write_text("")

    def told(*more: str) -> list[str]:
        loaded = load_config(str(tmp_path / "run.toml"), overrides=[*words, *more])
        return list(label_hints(loaded.config, loaded.base))

    assert told() == [
        "1 of 3 rows of rows.jsonl have a label that no answer can equal: that of the prompt '^b=' has 10 tokens, "
        "rollout.max_new_tokens = 8; raise it"
    ]
    assert told("rollout.max_new_tokens=10") == told("reward.function=math") == []


@pytest.mark.parametrize("reward", ["math", "boxed_math", "deepscaler", "gpqa"])
def test_a_label_that_a_built_in_reward_cannot_read_is_refused(tmp_path: Path, monkeypatch, reward: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "a", "label": "1"}\n{"prompt": "b", "label": {"style": "rule", "ground_truth": "6"}}\n'
    )
    (tmp_path / "run.toml").write_text("")
    words = ["task.source=rows.jsonl", f"reward.function={reward}", "eval.prompts=0"]
    loaded = load_config(str(tmp_path / "run.toml"), overrides=words)

    [fault] = label_faults(loaded.config, tmp_path)

    assert fault.keys == ("task.source", "reward.function")
    assert f"the reward {reward} refuses the label of the prompt 'b'" in fault.message
    assert "label_key" in fault.message
