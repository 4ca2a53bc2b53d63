"""Each kind of data makes rows by seed and number, and only one kind takes a name."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.sources import KINDS, open_source
from asyncrl.environments.protocol import DataError, DataSource

ROWS = "".join(f'{{"prompt": "p{number}", "label": {number}}}\n' for number in range(20))
CODE = """
def endless(seed, width=1):
    class Rows:
        def row(self, index):
            return {"prompt": f"p{seed * 1000 + index:0{width}}", "label": index}
    return Rows()

def listed(seed, width=1):
    return [{"prompt": f"p{number:0{width}}", "label": number} for number in range(20)]
"""
SAMPLES: dict[str, dict[str, Any]] = {
    "rows.jsonl": {"prompt_key": "prompt"},
    "rows.jsonl@[2:]": {},
    "reverse": {"letters": 4},
    "sum": {"digits": 3},
    "reasoning-gym:leg_counting": {"max_animals": 4},
    "mine.py:endless": {"width": 3},
    "mine.py:listed": {"width": 3},
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


def opened(base: Path, spec: str, seed: int) -> DataSource:
    return open_source(spec, options=SAMPLES[spec], seed=seed, base=base)


def test_each_kind_has_a_sample_that_no_other_kind_takes():
    taken = [[number for number, kind in enumerate(KINDS) if kind.matches(spec)] for spec in SAMPLES]

    assert all(len(numbers) == 1 for numbers in taken)
    assert {numbers[0] for numbers in taken} == set(range(len(KINDS)))


@pytest.mark.parametrize("spec", SAMPLES)
def test_a_row_depends_on_seed_and_number_alone(spec: str, base: Path):
    one, same, other = (opened(base, spec, seed) for seed in (1, 1, 2))
    numbers = range(15)

    assert [one.row(number) for number in reversed(numbers)] == [same.row(number) for number in reversed(numbers)]
    assert [one.row(number) for number in numbers] != [other.row(number) for number in numbers]


@pytest.mark.parametrize("spec", SAMPLES)
def test_a_source_with_an_end_begins_another_epoch_with_the_same_rows(spec: str, base: Path):
    source = opened(base, spec, 1)
    rows = source.rows_per_epoch or 0

    assert source.describe()
    first, second = ({str(source.row(number)) for number in range(at, at + rows)} for at in (0, rows))
    assert first == second
    assert len(first) == rows


@pytest.mark.parametrize("spec", SAMPLES)
def test_an_unknown_option_is_refused(spec: str, base: Path):
    with pytest.raises(DataError, match="colour"):
        open_source(spec, options={"colour": "red"}, seed=1, base=base)
