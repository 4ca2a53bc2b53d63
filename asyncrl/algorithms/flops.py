"""The work of a row, by which ranks are balanced and measured."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """Floating-point operations of training a decoder-only transformer on a row of T tokens, forward and backward.

    Linear layers take 6 P T: a multiplication and an addition for each of P parameters and token forward, and twice
    that backward. Causal attention takes 6 L A T^2, with A = heads x size of a head: query times key and weights times
    values are 2 x 2 A T^2 in each of L layers, half of it masked, and twice that backward. So they are counted in
    Megatron-LM, arXiv 2104.04473, appendix, but for its recomputation and with causal attention at half.
    """

    parameters: int  # P: of the matrices that every token passes, the projection to the vocabulary among them
    attention: int  # L x A

    def of(self, tokens: int) -> float:
        """Operations of a row."""
        return 6.0 * self.parameters * tokens + 6.0 * self.attention * tokens**2
