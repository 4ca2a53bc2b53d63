"""The parts of a reply while its tokens come: reasoning, text, and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.live.apis.schema import Call, Piece, Request, Thought
from asyncrl.live.reasoning_parser import ThoughtText, begun, thought_tokens
from asyncrl.live.tools import CallText, Wording
from topics.wire import Int32Array


class ReplyParts:
    """A reply as its client gets it: reasoning where the request has a place for it."""

    def __init__(self, request: Request, wording: Wording, turn: str, *, begun: str = "") -> None:
        """
        Args:
            turn: its id, which ids of calls are made of.
            begun: text of the reply at the end of the prompt.
        """
        plain = request.forced is not None or bool(request.schema) or request.raw is not None
        self._text = ReplyText(wording.tokenizer, request.stop, request.stop_ids)
        self._thoughts = ThoughtText(opened=None if plain else wording.opened(request.variables) and request.reasons)
        self._calls = CallText(wording.form if request.tools else None, turn)
        self._calls.add(begun)
        self._tokenizer = wording.tokenizer
        self._reasons = bool(request.thoughts)

    @property
    def text(self) -> str:
        """Return its text so far, without calls and reasoning."""
        return self._calls.text

    @property
    def calls(self) -> list[Call]:
        """Return its calls of tools so far."""
        return self._calls.calls

    @property
    def thoughts(self) -> str:
        """Return its reasoning so far."""
        return self._thoughts.thoughts

    @property
    def invalid(self) -> int:
        """Return how many calls are none."""
        return self._calls.invalid

    @property
    def stop(self) -> str | None:
        """Return the stop sequence that was met."""
        return self._text.stop

    def add(self, ids: Int32Array) -> list[Piece]:
        """Return the text that new tokens make final."""
        return self._called(self._thoughts.add(self._text.add(ids)))

    def end(self) -> list[Piece]:
        """Return what waited for more."""
        rest = [*self._thoughts.add(self._text.end()), *self._thoughts.end()]
        return [*self._called(rest), *self._calls.end()]

    def thought_tokens(self, ids: Int32Array) -> int:
        """Return how many of its tokens are reasoning."""
        return thought_tokens(self._tokenizer, ids) if self.thoughts else 0

    def _called(self, pieces: list[str | Thought]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            if not isinstance(piece, Thought):
                found += self._calls.add(piece)
            elif self._reasons:
                found.append(piece)
        return found


class ReplyText:
    """Text that is final once it is given: half a character, and a possible begin of a stop sequence, wait."""

    def __init__(self, tokenizer: TaskTokenizer, stops: Sequence[str], stop_ids: Collection[int] = ()) -> None:
        """
        Args:
            stop_ids: tokens that end the reply and are no text of it.
        """
        self.stop: str | None = None  # the stop sequence that was met; nothing follows it
        self.sent = ""
        self._step: Callable[[int], str] = tokenizer.decoder()
        self._stops, self._stop_ids = stops, frozenset(stop_ids)
        self._waiting = ""

    def add(self, ids: Int32Array) -> str:
        """Return the new text that is final."""
        if self.stop is None:
            said = (token for token in ids.tolist() if token not in self._stop_ids)
            self._waiting += "".join(map(self._step, said))
            found = [(place, stop) for stop in self._stops if (place := self._waiting.find(stop)) >= 0]
            if found:
                place, self.stop = min(found)
                return self._take(place)
        held = len(self._waiting) if self.stop is not None else begun(self._waiting, *self._stops)
        return self._take(len(self._waiting) - held)

    def end(self) -> str:
        """Return the text that waited for more; empty after a stop sequence."""
        return "" if self.stop is not None else self._take(len(self._waiting))

    def _take(self, size: int) -> str:
        text, self._waiting = self._waiting[:size], self._waiting[size:]
        self.sent += text
        return text
