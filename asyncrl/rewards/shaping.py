"""Shaping of rewards by the length of the trajectory."""

from __future__ import annotations


def overlong_penalty(tokens: int, *, longest: int, interval: int) -> float:
    """Punishment of long trajectories, from 0 down to -1.

    0 up to `longest - interval` tokens, then falling in proportion, -1 at `longest` and beyond it.
    Source: soft over-long punishment of DAPO (arXiv 2503.14476, eq. 13), with `longest` for L_max and `interval` for
    L_cache.
    """
    free = longest - interval
    if tokens <= free:
        return 0.0
    return (free - tokens) / interval if tokens <= longest else -1.0
