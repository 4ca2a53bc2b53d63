"""Rows that the policy has mastered leave the order of the data, and come back to be tested again."""

from asyncrl.data.mastery import Mastered, MasteryRule
from asyncrl.epochs import row_at

RULE = MasteryRule(reward=1.0, groups=2, epochs=3, rows=5, seed=7)


def row_of(state: Mastered, number: int) -> int:
    return row_at(RULE.place(state, number), RULE.rows, RULE.seed)


def test_a_row_leaves_after_groups_that_pass_one_after_the_other_and_another_takes_its_turn():
    state, row = Mastered(), row_at(0, 5, 7)
    places = [number for number in range(25) if row_at(number, 5, 7) == row]

    for number, rewards in zip(places, ([1.0, 1.0], [1.0, 0.0], [1.0, 1.0]), strict=False):
        RULE.record(state, number, rewards, leaves_at=number + 3)
    assert (state.passed[row], state.rates[row], state.changes) == (1, 1.0, {})

    RULE.record(state, places[3], [1.0, 1.0], leaves_at=places[3] + 3)

    leaves = places[3] + 3
    assert state.changes == {row: [leaves, leaves + 15]}
    assert [row_of(state, number) for number in range(leaves)] == [row_at(number, 5, 7) for number in range(leaves)]
    assert row not in {row_of(state, number) for number in range(leaves, leaves + 15)}
    assert row in {row_of(state, number) for number in range(leaves + 15, leaves + 25)}
    assert (RULE.out(state, leaves), RULE.out(state, leaves + 15)) == (1, 0)


def test_at_the_next_test_one_group_decides():
    state, row = Mastered(), row_at(0, 5, 7)
    for number in (0, next(number for number in range(5, 10) if row_at(number, 5, 7) == row)):
        RULE.record(state, number, [1.0], leaves_at=12)
    back = state.changes[row][1]
    test = next(number for number in range(back, back + 10) if row_of(state, number) == row)

    failed = Mastered(dict(state.passed), dict(state.rates), {row: [*state.changes[row]]})
    RULE.record(state, test, [1.0], leaves_at=test + 2)
    RULE.record(failed, test, [0.0], leaves_at=test + 2)

    assert state.changes[row][2:] == [test + 2, test + 17]
    assert (failed.changes[row][2:], failed.passed[row]) == ([], 0)


def test_groups_that_were_under_way_when_a_row_left_change_nothing():
    state = Mastered()
    for number in (0, 5, 10):
        place = next(place for place in range(number, number + 5) if row_at(place, 5, 7) == row_at(0, 5, 7))
        RULE.record(state, place, [1.0], leaves_at=20)

    assert state.changes == {row_at(0, 5, 7): [20, 35]}


def test_when_all_rows_are_mastered_the_order_is_that_of_the_data():
    state = Mastered(changes={row: [0, 100] for row in range(5)})

    assert [RULE.place(state, number) for number in range(10)] == list(range(10))
