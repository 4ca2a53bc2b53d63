"""Judges and users about the same turns: each grade counts once, whoever spoke first and however often."""

import pytest

from asyncrl.live.agreement import Agreement


@pytest.mark.parametrize("first", ["judge", "user"])
def test_a_grade_counts_once_though_both_speak_again(first: str):
    agreement = Agreement()
    for who in (first, "user", "judge", "user", "judge"):
        agreement.judge("a t1", 1.0) if who == "judge" else agreement.user("a t1", 1.0)

    assert (agreement.against, agreement.share) == ([False], 1.0)
    agreement.judge("a t2", 1.0)
    agreement.user("a t2", -1.0)
    assert (agreement.against, agreement.share) == ([False, True], 0.5)
