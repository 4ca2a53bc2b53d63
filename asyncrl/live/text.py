"""The text of a reply while its tokens come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.data.tokenizer import TaskTokenizer
from topics.wire import Int32Array


class ReplyText:
    """Text that is final as soon as it is given: half a character, and what may begin a stop sequence, wait."""

    def __init__(self, tokenizer: TaskTokenizer, stops: Sequence[str]) -> None:
        self.stop: str | None = None  # the stop sequence that was met; nothing follows it
        self.sent = ""
        self._step: Callable[[int], str] = tokenizer.decoder()
        self._stops = stops
        self._waiting = ""

    def add(self, ids: Int32Array) -> str:
        """Return the new text that is final."""
        if self.stop is None:
            self._waiting += "".join(map(self._step, ids.tolist()))
            found = [(place, stop) for stop in self._stops if (place := self._waiting.find(stop)) >= 0]
            if found:
                place, self.stop = min(found)
                return self._take(place)
        return self._take(len(self._waiting) - self._held())

    def end(self) -> str:
        """Return the text that waited for more; none behind a stop sequence."""
        return "" if self.stop is not None else self._take(len(self._waiting))

    def _held(self) -> int:
        """Return how many characters at the end may begin a stop sequence."""
        if self.stop is not None:
            return len(self._waiting)
        longest = max(map(len, self._stops), default=0)
        for size in range(min(longest - 1, len(self._waiting)), 0, -1):
            if any(stop.startswith(self._waiting[-size:]) for stop in self._stops):
                return size
        return 0

    def _take(self, size: int) -> str:
        text, self._waiting = self._waiting[:size], self._waiting[size:]
        self.sent += text
        return text
