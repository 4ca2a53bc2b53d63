"""Marks of a reply."""

import numpy as np

from asyncrl.config.live_settings import SafetySettings
from asyncrl.live.reply_flags import dedup_digest, reply_flags

PLAIN = np.arange(40, dtype=np.int32)
LOOP = np.full(60, 7, np.int32)
SAFETY = SafetySettings(question=r"shall i|would you like")


def test_a_reply_that_repeats_itself_or_is_no_text_is_garbage():
    assert reply_flags("fine", PLAIN, SAFETY, invalid_calls=0) == []
    assert reply_flags("aaaa", LOOP, SAFETY, invalid_calls=0) == ["garbage"]
    assert reply_flags("a\ufffd\x01b", PLAIN, SAFETY, invalid_calls=0) == ["garbage"]
    assert reply_flags("aaaa", LOOP, SafetySettings(repetition=1.0, garbage=1.0), invalid_calls=0) == []


def test_needless_questions_are_found_by_the_users_pattern_and_invalid_calls_by_their_number():
    assert reply_flags("Shall I go on?", PLAIN, SAFETY, invalid_calls=2) == ["invalid call", "question"]
    assert reply_flags("Shall I go on?", PLAIN, SafetySettings(), invalid_calls=0) == []


def test_turns_are_the_same_by_data_key_prompt_and_reply():
    anna, ben = b"a" * 32, b"b" * 32
    same = dedup_digest(anna, PLAIN, LOOP)
    assert same == dedup_digest(anna, PLAIN.copy(), LOOP)
    others = [(ben, PLAIN, LOOP), (anna, LOOP, PLAIN), (anna, np.append(PLAIN, 7), LOOP[1:])]
    assert same not in [dedup_digest(key, prompt.astype(np.int32), reply) for key, prompt, reply in others]
