"""`asyncrl check` prints the tokens that end an answer."""

import json
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.run.stop_tokens import stop_token_lines
from harness.tokenizers import QWEN3, QWEN3_TOKENS, make_model

ADDED = "stop tokens: <|endoftext|>, <|im_end|> (the last one ends a turn in the chat template; "


def lines(folder: Path, eos: str | None, template: str | None, *settings: str) -> list[str]:
    (folder / "model").mkdir()
    make_model(folder / "model", template=template, special=QWEN3_TOKENS, eos=eos)
    (folder / "run.toml").write_text('model.path = "model"\n')
    loaded = load_config(str(folder / "run.toml"), overrides=[*settings])
    return list(stop_token_lines(loaded.config, loaded.base))


@pytest.mark.parametrize(
    ("eos", "template", "begin"),
    [
        ("<|im_end|>", QWEN3, "stop tokens: <|im_end|>"),
        ("<|endoftext|>", QWEN3, ADDED),
        ("<|endoftext|>", None, "stop tokens: <|endoftext|>"),
        (None, None, "hint: model names no token that ends an answer, so each answer has rollout.max_new_tokens = 256"),
    ],
)
def test_the_tokens_that_end_an_answer_are_printed(tmp_path: Path, eos: str | None, template: str | None, begin: str):
    (line,) = lines(tmp_path, eos, template)

    assert line.startswith(begin)
    assert (line == begin) == (begin.endswith("|>"))


def test_a_model_without_an_end_may_have_a_stop_string(tmp_path: Path):
    assert lines(tmp_path, None, None, f"rollout.stop={json.dumps(['.'])}") == []
