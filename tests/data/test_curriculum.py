"""Difficulty that rises with accuracy: the rule against a loop written from its source, and rows of every level."""

import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from asyncrl.config.settings import Config
from asyncrl.config.tasks import rows_of
from asyncrl.data.curriculum import Climb, Curriculum, Ladder, at_level, level_of
from asyncrl.data.row_maker import RowMaker
from asyncrl.data.sources import RowSetup, RowsPart, open_rows
from asyncrl.environments.protocol import DataError

RULE = Curriculum(window=4, top=9, answers=16, accuracy=0.9, passing=1.0, seed=7)
LETTERS = Ladder("letters", first=2, step=3, last=9)


def climbed(accuracy, prompts, rule=RULE, size=4):
    """The climb after so many prompts whose answers pass with some probability, and that of a scalar loop."""
    draw = random.Random(3)
    climb, h, a, b = Climb(), 0, 0, 0
    for number in range(prompts):
        d = rule.level(climb, number)
        rewards = [float(draw.random() < accuracy) for _ in range(size)]
        rule.record(climb, number, rewards, rises_at=number + 1)
        if d == h:
            a, b = a + sum(rewards), b + size
            if b >= rule.answers:
                h += a / b >= rule.accuracy and h < rule.top
                a = b = 0
    return climb, h, (a, b)


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.85, 0.95, 1.0])
def test_the_difficulty_is_that_of_a_loop_written_from_rlve(accuracy):
    for prompts in (0, 3, 4, 50, 400):
        climb, h, counts = climbed(accuracy, prompts)
        assert (len(climb.rises), (climb.passed, climb.answers)) == (h, counts)


def test_the_difficulty_rises_with_every_full_count_and_not_below_the_accuracy_nor_above_the_last():
    assert len(climbed(1.0, 4)[0].rises) == 1  # 16 answers, all of level 0
    assert len(climbed(1.0, 3)[0].rises) == 0
    assert len(climbed(0.5, 1000, RULE._replace(answers=64))[0].rises) == 0
    assert len(climbed(1.0, 1000)[0].rises) == RULE.top


def test_at_the_accuracy_it_rises_and_the_count_begins_again_either_way():
    climb = Climb()
    rule = RULE._replace(answers=10)

    rule.record(climb, 0, [1.0] * 8 + [0.0] * 2, rises_at=1)
    assert climb == Climb()
    rule.record(climb, 1, [1.0] * 9 + [0.5], rises_at=5)
    assert climb == Climb(rises=[5])


def test_answers_to_lower_levels_and_to_prompts_issued_before_a_rise_are_not_counted():
    climb = Climb(rises=[10])
    easy = next(number for number in range(10, 99) if RULE.level(climb, number) == 0)

    RULE.record(climb, easy, [1.0] * 16, rises_at=99)
    RULE.record(climb, 9, [1.0] * 16, rises_at=99)

    assert climb == Climb(rises=[10])


def test_levels_are_drawn_evenly_from_the_window_and_follow_from_the_number():
    climb = Climb(rises=[0, 0, 0, 0, 0, 1000])
    found = Counter(RULE.level(climb, number) for number in range(1000))

    assert set(found) == {2, 3, 4, 5}
    assert all(abs(count - 250) < 50 for count in found.values())
    assert {RULE.level(climb, number) for number in range(1000, 1400)} == {3, 4, 5, 6}
    assert [RULE.level(climb, number) for number in range(1000)] == [
        RULE.level(Climb(rises=climb.rises[:5]), number) for number in range(1000)
    ]


def setup_of(*parts, turns=(0,)):
    return RowSetup(list(parts), list(turns), seed=0, base=".")


async def test_rows_are_of_the_level_that_their_place_holds():
    maker = await RowMaker.open(setup_of(RowsPart("reverse", ladder=LETTERS)))
    places = [at_level(5, level) for level in range(3)]
    maker.want(places)
    rows = [await maker.row(place) for place in places]
    await maker.close()

    assert [len(row.label) for row in rows] == [2, 5, 8]
    assert [row.metadata for row in rows] == [{"difficulty": letters} for letters in (2, 5, 8)]
    assert [level_of(place) for place in places] == [0, 1, 2]
    assert maker.opened.description == "reverse: 2 letters, 26**2 prompts; letters from 2 to 8"


def test_tasks_with_and_without_a_curriculum_mix():
    rows = open_rows(setup_of(RowsPart("sum"), RowsPart("reverse", ladder=LETTERS), turns=(0, 1, 1)))
    alone = open_rows(setup_of(RowsPart("reverse", ladder=LETTERS)))

    assert rows.row(at_level(4, 2)) == alone.row(at_level(2, 2))
    assert rows.row(3) == open_rows(setup_of(RowsPart("sum"))).row(1)


def test_the_hardest_rows_are_among_those_that_are_checked():
    places = open_rows(setup_of(RowsPart("reverse", ladder=LETTERS))).longest(3)

    assert places == [at_level(place, 2) for place in range(3)]


@pytest.mark.parametrize(
    ("spec", "ladder", "message"),
    [
        ("rows.jsonl", Ladder("prompt_key", 1, 1, 2), "rows.jsonl"),
        ("reverse", Ladder("digits", 1, 1, 2), "data 'reverse'"),
        ("reverse", Ladder("letters", 1, 1, 65), "data 'reverse'"),  # beyond what the source takes
    ],
)
def test_a_curriculum_that_a_source_cannot_follow_is_refused(spec, ladder, message):
    with pytest.raises(DataError, match=message):
        open_rows(setup_of(RowsPart(spec, ladder=ladder)))


def test_a_file_has_no_difficulty(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    setup = RowSetup([RowsPart("rows.jsonl", ladder=Ladder("prompt", 1, 1, 2))], [0], 0, str(tmp_path))

    with pytest.raises(DataError):
        open_rows(setup)


def test_held_out_rows_are_of_the_last_level():
    rule = {"option": "letters", "first": 2, "step": 3, "last": 9}
    config = msgspec.convert({"task": {"source": "reverse", "curriculum": rule}}, Config)

    assert open_rows(rows_of(config, Path())).row(0).metadata == {"difficulty": 2}
    assert len(open_rows(rows_of(config, Path(), held_out=True)).row(0).label) == 8
