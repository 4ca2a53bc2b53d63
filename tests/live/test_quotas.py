"""Limits of keys: requests of the last minute and tokens of the day, by tenant."""

import pytest

from asyncrl.live.apis.schema import LiveError
from asyncrl.live.keys import make_key
from asyncrl.live.quotas import DAY_S, Usage
from topics.keys import TurnCounted

NOON = 20_000 * DAY_S + DAY_S / 2


def counted(tokens: int, begun_s: float = NOON, tenant: str = "anna") -> TurnCounted:
    return TurnCounted(turn_id="t1", tenant=tenant, begun_s=begun_s, tokens=tokens)


def test_requests_of_the_last_minute_count_wherever_they_were_made():
    usage, key = Usage(), make_key("anna", requests_per_minute=3)[1]
    usage.take(counted(5, NOON - 61))
    usage.take(counted(5, NOON - 20))
    usage.take(counted(5, NOON - 20, "ben"))
    usage.begin(key, NOON)
    usage.begin(key, NOON + 1)

    with pytest.raises(LiveError, match="made 3 requests in the last minute; this key allows 3") as caught:
        usage.begin(key, NOON + 2)

    assert (caught.value.fault, caught.value.retry_s) == ("limited", 38)
    usage.begin(key, NOON + 40.5)
    usage.begin(make_key("ben", requests_per_minute=3)[1], NOON + 2)
    usage.begin(make_key("anna")[1], NOON + 2)  # a key without limits


def test_requests_that_other_gateways_answer_are_forgotten():
    usage = Usage()
    for number in range(100):
        usage.take(counted(1, NOON + 25 * number))

    assert [len(begun) for begun in usage._begun.values()] == [3]


def test_tokens_count_until_the_day_is_over():
    usage, key = Usage(), make_key("anna", tokens_per_day=10)[1]
    usage.begin(key, NOON)
    usage.take(counted(9), known=True)
    usage.begin(key, NOON + 1)
    usage.take(counted(1, NOON + 1), known=True)

    with pytest.raises(LiveError, match="used 10 tokens today") as caught:
        usage.begin(key, NOON + 2)

    assert caught.value.retry_s == DAY_S / 2 - 2
    usage.begin(key, NOON + DAY_S / 2)  # tomorrow


def test_a_clock_that_was_ahead_neither_uses_up_a_limit_nor_gives_it_back():
    usage, key = Usage(), make_key("anna", requests_per_minute=2, tokens_per_day=10)[1]
    usage.begin(key, NOON)
    usage.take(counted(9), known=True)
    for ahead_s in (NOON + 1000 * DAY_S, NOON + 1000 * DAY_S + 1):
        usage.begin(key, ahead_s)
        usage.take(counted(5, ahead_s), known=True)
    usage.begin(key, NOON + 90)
    usage.take(counted(1, NOON + 90), known=True)

    with pytest.raises(LiveError, match="used 10 tokens today"):
        usage.begin(key, NOON + 91)
