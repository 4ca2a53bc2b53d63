"""Text of a reply is given once it is final."""

from pathlib import Path

import numpy as np
import pytest

from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.live.reply_parser import ReplyText
from harness.tokenizers import make_model


@pytest.fixture
def tokenizer(tmp_path: Path) -> TaskTokenizer:
    return TaskTokenizer.load(make_model(tmp_path))


def one_by_one(tokenizer: TaskTokenizer, ids: np.ndarray, stops: list[str]) -> tuple[list[str], ReplyText]:
    text = ReplyText(tokenizer, stops)
    return [*(text.add(ids[place : place + 1]) for place in range(len(ids))), text.end()], text


@pytest.mark.parametrize("words", ["What is the answer?", "Größe 東京 🙂 é", ""])
def test_pieces_are_whole_characters_and_make_the_text(tokenizer: TaskTokenizer, words: str):
    pieces, text = one_by_one(tokenizer, np.append(tokenizer.encode(words), np.int32(tokenizer.eos_ids[0])), [])

    assert "".join(pieces) == text.sent == words
    assert not any("\ufffd" in piece for piece in pieces)
    assert text.stop is None


def test_a_stop_sequence_and_what_follows_it_are_not_given(tokenizer: TaskTokenizer):
    pieces, text = one_by_one(tokenizer, tokenizer.encode("What is the answer to this"), ["answer", "never"])

    assert ("".join(pieces), text.stop) == ("What is the ", "answer")
    assert all("a" not in piece.replace("What", "") for piece in pieces)


def test_what_only_seemed_to_begin_a_stop_sequence_is_given_at_the_end(tokenizer: TaskTokenizer):
    pieces, text = one_by_one(tokenizer, tokenizer.encode("What is the answ"), ["answer"])

    assert ("".join(pieces), text.stop) == ("What is the answ", None)
    assert pieces[-1] == "answ"


def test_the_first_of_several_stop_sequences_counts(tokenizer: TaskTokenizer):
    text = ReplyText(tokenizer, ["this", "the"])

    assert text.add(tokenizer.encode("What is the answer to this")) == "What is "
    assert text.stop == "the"
