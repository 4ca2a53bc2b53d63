"""The least number of tokens that a text has: never more than it has, and near that where texts have words."""

import random
from collections.abc import Sequence

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from asyncrl.data.least_tokens import LeastTokens

WORDS = (
    "the cat, the dog; (and a bird) were 12 or 345 of them.\n"
    "They said: é, naïve, 漢字, 😀!\n\n  def f(x):\n    return x\n"
)
GPT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = [
    AddedToken("<|im_start|>", special=True),
    AddedToken("<|user|>", special=True, rstrip=True),
    AddedToken("<mask>", special=True, lstrip=True),
    AddedToken("two words", normalized=True),
]


def byte_level(*, composes: bool = True, added: Sequence[AddedToken] = SPECIAL) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC() if composes else None
    split = pre_tokenizers.Split(Regex(GPT), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([WORDS] * 50, trainer)
    tokenizer.add_tokens(added)
    return tokenizer


def of_characters() -> Tokenizer:
    vocabulary = {character: number for number, character in enumerate(dict.fromkeys(WORDS + "e\u0301<|>_m"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.add_tokens(SPECIAL)
    return tokenizer


KNOWN = {
    "byte-level": byte_level,
    "byte-level without NFC": lambda: byte_level(composes=False),
    "characters": of_characters,
}


@pytest.mark.parametrize("kind", KNOWN)
def test_no_text_has_less_tokens_than_that(kind: str):
    tokenizer, drawn = KNOWN[kind](), random.Random(1)
    least = LeastTokens.of(tokenizer)
    assert least is not None
    parts = [*WORDS.split(" "), " ", "\n", " " * 9, "e\u0301", "e", *(token.content for token in SPECIAL), "<|user|>  "]

    for _ in range(2000):
        text = "".join(drawn.choices(parts, k=drawn.randrange(30))) * drawn.choice([1, 1, 9])
        assert least(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids), repr(text)


def test_it_is_near_what_a_text_of_words_has():
    tokenizer, text = byte_level(added=SPECIAL[:1]), "the bird and the dog were 3 of them, "
    least = LeastTokens.of(tokenizer)

    assert least is not None and least(text * 100) > 0.5 * len(tokenizer.encode(text * 100).ids)


def test_it_is_not_known_where_a_token_may_stand_for_any_text():
    for change in (
        lambda one: setattr(one, "normalizer", normalizers.Replace("a", "")),
        lambda one: setattr(one, "normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.Split("a", "removed")),
        lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda one: setattr(one, "pre_tokenizer", None),
    ):
        tokenizer = byte_level()
        change(tokenizer)
        assert LeastTokens.of(tokenizer) is None
    unknown = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    assert LeastTokens.of(unknown) is None
    few = Tokenizer(models.BPE({"a": 0}, []))
    few.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert LeastTokens.of(few) is None
