"""pass@k: the probability that at least one of k answers to a prompt is correct."""

from __future__ import annotations

import math


def pass_at(answers: int, correct: int, k: int) -> float:
    """Estimate pass@k of a prompt without bias, from more answers than k.

    Args:
        answers: n, sampled independently; at least k.
        correct: c, those of them that are correct.
        k: at least 1.

    Returns:
        1 - C(n - c, k) / C(n, k): the share of the subsets of k answers that hold a correct one.

    Raises:
        ValueError: there are fewer answers than k, or more correct ones than answers.

    Source: Chen et al., arXiv 2107.03374, equation 1; as the product of its numerically stable form.
    """
    if not 1 <= k <= answers or not 0 <= correct <= answers:
        raise ValueError(f"pass@{k} of {correct} correct of {answers} answers; expected 1 <= k <= answers >= correct")
    if answers - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / number for number in range(answers - correct + 1, answers + 1))
