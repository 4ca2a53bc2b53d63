"""Rows of reasoning-gym as chat messages that ask for the answer alone."""

from __future__ import annotations

from typing import Any

from asyncrl.environments.kinds import make

ONLY = "\nReply with the answer only."


class Chat:
    """A dataset whose questions are a user's messages."""

    def __init__(self, name: str, options: dict[str, Any], seed: int) -> None:
        self._source = make("reasoning-gym", name, options, seed)

    def row(self, index: int) -> dict[str, Any]:
        """Return one question; metadata has what the scorer of the dataset reads."""
        row = self._source.row(index)
        message = {"role": "user", "content": f"{row.prompt}{ONLY}"}
        return {"prompt": [message], "label": row.label, "metadata": row.metadata}


def rows(seed: int, name: str, **options: Any) -> Chat:
    """Return the questions of a dataset; `options` are fields of its configuration."""
    return Chat(name, options, seed)
