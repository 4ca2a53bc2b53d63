"""Requests that count what they are given."""

import asyncio

import numpy as np

from asyncrl.engine.generator import Watch

IDS = np.arange(3, 8, dtype=np.int32)


class Counting(Watch):
    """Calls a function once when so many tokens of a generation have come."""

    def __init__(self, tokens: int = 0) -> None:
        self.reached = asyncio.Event()
        self.requests = 0
        self._left = tokens

    def requested(self, engine_id: str) -> None:
        self.requests += 1

    def on_tokens(self, tokens: int, discarded: int, lineage: int) -> None:
        self._left -= tokens
        if self._left <= 0:
            self.reached.set()
