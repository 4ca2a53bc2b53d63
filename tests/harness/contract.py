"""A server that a case of the contract runs against."""

from pathlib import Path
from typing import NamedTuple

import aiohttp

VOCAB, CONTEXT = 64, 128
HEADERS = {"Authorization": "Bearer secret"}


class Served(NamedTuple):
    """A server of one kind, and what the tests reach it by."""

    kind: str
    incremental: bool
    address: str
    model: Path  # version "none"

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(self.address, headers=HEADERS)
