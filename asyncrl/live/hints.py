"""Prompts with a hint: what the teacher of hindsight distillation is shown before the stored reply of a turn."""

from __future__ import annotations

import numpy as np

from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import read
from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.live.escape_special_tokens import Quoted
from asyncrl.live.stored import StoredTurn
from topics.turns import TURN_JUDGED, TurnJudged
from topics.wire import Int32Array, WireError

_MARK = "\ufdd2"  # in the place of a message; Unicode keeps it from ever standing for a character


class HintWriter:
    """Writes a hint into a prompt, at the end of its last message.

    The prompt stays the ids that the engine was sent, up to where the chat template closes the last message and opens
    the reply; the hint alone is encoded. The place is found by difference, as that of a reply is.
    """

    def __init__(self, tokenizer: TaskTokenizer, wording: str) -> None:
        """
        Args:
            wording: with `{hint}`.

        Raises:
            TokenizerError: the template refuses a user's message.
        """
        self._quoted, self._wording = Quoted(tokenizer), wording
        *_, behind = tokenizer.chat_text([{"role": "user", "content": _MARK}]).partition(_MARK)
        self._opening = tokenizer.encode(behind)

    def hinted(self, prompt: Int32Array, hint: str) -> Int32Array | None:
        """Return a prompt with a hint; None where its last message does not end as the template ends a user's.

        Args:
            prompt: [P].

        Raises:
            TokenizerError: the model has no tokens for the hint.
        """
        end = len(prompt) - len(self._opening)
        if end < 0 or not np.array_equal(prompt[end:], self._opening):
            return None
        (message,) = self._quoted.messages([{"role": "user", "content": self._wording.replace("{hint}", hint)}])
        return np.concatenate([prompt[:end], self._quoted.encode(message["content"]), self._opening])


class HintReader:
    """Reads the hints that judges gave about a turn."""

    def __init__(self, bus: Bus, writer: HintWriter, *, context: int) -> None:
        self._bus, self._writer = bus, writer
        self._context = context  # tokens that the model takes
        self.unplaced = 0  # hints so far that fit into no prompt

    async def prompts(self, turn: StoredTurn, reward: float) -> list[Int32Array]:
        """Return the prompt of a turn with each hint of its judge, [P] each; none where a user saw it otherwise.

        Args:
            reward: that the turn was admitted with; a hint of a judge whom the user overruled says nothing.

        Raises:
            BusError: the server does not answer.
        """
        record = await read_last(self._bus, TURN_JUDGED, turn.started.turn_id)
        if record is None:
            return []
        try:
            judged = await read(self._bus, TurnJudged, record)
        except (WireError, BlobMissing):
            return []
        if judged.reward is None or np.sign(judged.reward) != np.sign(reward):
            return []
        found = [self._placed(turn, hint) for hint in judged.hints]
        self.unplaced += sum(prompt is None for prompt in found)
        return [prompt for prompt in found if prompt is not None]

    def _placed(self, turn: StoredTurn, hint: str) -> Int32Array | None:
        try:
            prompt = self._writer.hinted(turn.prompt, hint)
        except TokenizerError:
            return None
        fits = prompt is not None and len(prompt) + len(turn.finished.tokens) <= self._context
        return prompt if fits else None
