"""A server that a case of the contract runs against."""

import json
from pathlib import Path
from typing import NamedTuple

import aiohttp

VOCAB, CONTEXT = 64, 2048
LONG_TOKENS, WHOLE_TOKENS = 1900, 800  # of a generation that is cut off, and of one that ends: calls meet both
HEADERS = {"Authorization": "Bearer secret"}


class Served(NamedTuple):
    """A server of one kind, and what the tests reach it by."""

    kind: str
    incremental: bool
    address: str
    model: Path  # version "none"

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(self.address, headers=HEADERS)


def widen(model: Path) -> None:
    """Give a saved model this context."""
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT}))
