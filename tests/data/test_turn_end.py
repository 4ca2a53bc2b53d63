"""The end of a turn: of chat templates whose models name another token as their end."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.model_dir import read_json
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.weights.model_folder import name_stop_tokens
from harness.tokenizers import LLAMA3, LLAMA3_SPECIAL, QWEN3, QWEN3_SAID, QWEN3_TOKENS, make_model
from topics.prompts import PromptRow

USER = {"role": "user", "content": "a"}
WITHOUT = "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content }}{% endfor %}"
TEXT = "{% for m in messages %}{{ m.content + '</s>' }}{% endfor %}"
REFUSES = "{{ raise_exception('no') }}"


def base_model(folder: Path, eos: Any = "<|endoftext|>", **options: Any) -> TaskTokenizer:
    """A base model: its chat template ends turns, and its other files name another end or none."""
    options = {"template": QWEN3, "special": QWEN3_TOKENS, "said": QWEN3_SAID} | options
    return TaskTokenizer.load(make_model(folder, eos=eos, **options))


def test_the_end_of_a_turn_is_an_end_that_engines_are_told_of(tmp_path: Path):
    tokenizer = base_model(tmp_path)

    assert [tokenizer.decode_all([token]) for token in tokenizer.eos_ids] == ["<|endoftext|>", "<|im_end|>"]
    assert tokenizer.stop_ids == tokenizer.eos_ids[1:]


@pytest.mark.parametrize(("template", "special"), [(QWEN3, QWEN3_TOKENS), (LLAMA3, LLAMA3_SPECIAL)])
def test_an_end_that_the_model_names_is_in_no_request(tmp_path: Path, template: str, special: tuple[str, ...]):
    tokenizer = base_model(tmp_path, eos=special[-1], template=template, special=special)

    assert tokenizer.turn_end == tokenizer.eos_ids[0]
    assert tokenizer.stop_ids == []


@pytest.mark.parametrize("template", [WITHOUT, TEXT, REFUSES, None])
def test_a_template_that_ends_turns_with_no_token_adds_no_end(tmp_path: Path, template: str | None):
    tokenizer = base_model(tmp_path, template=template)

    assert (tokenizer.turn_end, len(tokenizer.eos_ids)) == (None, 1)


def test_a_supervised_chat_ends_with_the_end_of_its_turn_and_a_text_with_the_end_of_the_model(tmp_path: Path):
    tokenizer = base_model(tmp_path)

    def trained(row: PromptRow) -> str:
        ((tokens, mask),) = tokenizer.encode_supervised(row)
        return tokenizer.decode_all(tokens[mask == 1].tolist())

    assert trained(PromptRow([USER], "yes")) == "yes<|im_end|>"
    assert trained(PromptRow([USER, {"role": "assistant", "content": "yes"}])).endswith("yes<|im_end|>")
    assert trained(PromptRow("a", "yes")) == "yes<|endoftext|>"


def test_an_exported_model_names_the_end_of_a_turn(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "eos_token_id": 0}')
    tokenizer = base_model(tmp_path)

    name_stop_tokens(tmp_path)

    found = read_json(tmp_path / "generation_config.json")
    assert found == {"do_sample": True, "eos_token_id": tokenizer.eos_ids}
    assert TaskTokenizer.load(tmp_path).stop_ids == []


def test_a_model_that_names_its_end_is_exported_as_it_was(tmp_path: Path):
    base_model(tmp_path, eos="<|im_end|>")

    name_stop_tokens(tmp_path)

    assert not (tmp_path / "generation_config.json").exists()
