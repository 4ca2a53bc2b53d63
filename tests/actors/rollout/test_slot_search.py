"""The search for the number of slots, on engines whose rate is a function of the running requests."""

from collections.abc import Callable

import pytest

from actors.rollout.slots import SlotSearch


def search(rate: Callable[[int], float], *, most: int, windows: int) -> list[int]:
    """The slots after each window of an engine that answers with 100 tokens each time."""
    slots = SlotSearch(1, lambda _: most)
    now, tokens, found = 0.0, 0.0, []
    for _ in range(windows):
        for _ in range(2):
            slots.decide(now, int(tokens), slots.slots)
            count = max(4 * slots.slots, int(rate(slots.slots) / 4))
            seconds = count * 100 / rate(slots.slots)
            now, tokens = now + seconds, tokens + count * 100
            for _ in range(count):
                slots.ended(100)
        found.append(slots.decide(now, int(tokens), slots.slots))
    return found


def test_slots_that_do_not_speed_the_engine_up_are_given_up():
    found = search(lambda slots: 100.0 * min(slots, 64), most=256, windows=40)

    assert 64 <= sorted(found[20:])[10] <= 82


def test_an_engine_that_becomes_slower_with_more_requests_gets_fewer():
    found = search(lambda slots: slots / (0.003 + 1e-5 * slots + 1.7e-7 * slots**2), most=512, windows=40)

    assert 96 <= sorted(found[20:])[10] <= 180  # the best is 133


def test_slots_that_all_speed_the_engine_up_stay():
    found = search(lambda slots: 100.0 * slots, most=64, windows=100)

    assert sum(found) / len(found) > 0.95 * 64


def test_slots_that_are_not_all_taken_are_not_judged():
    slots = SlotSearch(1, lambda _: 64)

    for second in range(100):
        for _ in range(64):
            slots.ended(100)
        assert slots.decide(float(second), second, 32) == 64


def test_wider_lengths_lower_the_bound_and_the_slots_follow_it():
    slots = SlotSearch(1, lambda sigma: 64 if sigma is None or sigma < 1 else 50)

    for number in range(128):
        slots.ended(10 if number % 2 else 1000)

    assert slots.decide(1.0, 0, 64) == 50


@pytest.mark.parametrize("most", [1, 2])
def test_a_worker_keeps_its_only_slots(most: int):
    assert set(search(lambda slots: 100.0, most=most, windows=10)) <= {1, most}
