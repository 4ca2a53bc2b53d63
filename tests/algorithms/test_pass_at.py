"""pass@k equals the share of the subsets of k answers that hold a correct one."""

from fractions import Fraction
from itertools import combinations

import pytest

from asyncrl.algorithms.pass_at import pass_at


def by_subsets(answers, correct, k):
    """Equation 1 of Chen et al., counted instead of computed."""
    found = [any(number < correct for number in chosen) for chosen in combinations(range(answers), k)]
    return Fraction(sum(found), len(found))


@pytest.mark.parametrize("answers", range(1, 8))
def test_it_is_the_share_of_subsets_with_a_correct_answer(answers):
    for correct in range(answers + 1):
        for k in range(1, answers + 1):
            assert pass_at(answers, correct, k) == pytest.approx(float(by_subsets(answers, correct, k)), abs=1e-12)


def test_values_by_hand():
    assert pass_at(4, 1, 2) == pytest.approx(1 / 2)  # 3 of the 6 pairs hold the first one
    assert pass_at(10, 3, 1) == pytest.approx(0.3)
    assert pass_at(200, 1, 100) == pytest.approx(0.5)
    assert (pass_at(5, 0, 5), pass_at(5, 1, 5)) == (0.0, 1.0)


@pytest.mark.parametrize("wrong", [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)])
def test_what_is_no_estimate_is_refused(wrong):
    with pytest.raises(ValueError, match="expected 1 <= k <= answers"):
        pass_at(*wrong)
