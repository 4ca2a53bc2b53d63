"""Stop strings, which end a generation where its text has them."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from asyncrl.engine.answer import stop_string
from asyncrl.engine.embedded.request import Request
from asyncrl.engine.errors import EngineRefused


class StopStrings:
    """Looks for stop strings with a model's tokenizer, which is read when it is first needed."""

    def __init__(self, model: Path) -> None:
        self._path = model / "tokenizer.json"

    def check(self) -> None:
        """Check that there is a tokenizer.

        Raises:
            EngineRefused: the model directory has none.
        """
        if not self._path.exists():
            raise EngineRefused(f"stop strings need {self._path}, which does not exist; use stop_token_ids")

    def found(self, request: Request) -> str | None:
        """Return the stop string that the newest token of a request completes."""
        sampling, tokens = request.sampling, request.tokens
        if len(tokens) < sampling.min_new_tokens:
            return None
        return stop_string(tokens, sampling.stop, lambda tail: self._tokenizer.decode(tail, skip_special_tokens=False))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self._path))
