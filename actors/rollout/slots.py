"""The search for the number of slots: no more than the lag bound allows, and no more than speed the engines up."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable

_OBSERVED, _ENOUGH = 512, 128  # lengths that are kept, and that an estimate needs
_WINDOW_S, _WINDOW_ENDS = 20.0, 4  # shortest time in which a rate is measured, and ends for each slot
_DOWN, _UP = 0.8, 1.25  # changes of the slots
_SAME, _FASTER = 0.98, 1.03  # rates after a change down and up that keep it
_LONGEST_REST = 16  # windows between two failed changes


class SlotSearch:
    """Finds the fewest slots of a worker that give the highest rate of tokens.

    A window of constant slots ends when four times as many trajectories have ended as there are slots: updates and the
    spread of lengths change the rate of a shorter one. After each window the slots change by a quarter. The change is
    kept if the rate of the next window is as high with fewer slots, or higher with more slots. After a change that is
    not kept the search rests, longer each time.
    """

    def __init__(self, least: int, bound: Callable[[float | None], int]) -> None:
        """
        Args:
            least: fewest slots.
            bound: the most slots by the sigma of the logarithm of the lengths, None if it is not known.
        """
        self._least, self._bound = least, bound
        self._lengths: deque[int] = deque(maxlen=_OBSERVED)
        self._sigma: float | None = None
        self._most = max(least, bound(None))
        self.slots = self._most
        self._known: tuple[int, float] | None = None  # slots and rate before the change that is being tried
        self._down = True
        self._rest, self._resting = 1, 1
        self._window: tuple[float, int] | None = None  # time and tokens at its begin
        self._ended = 0

    def ended(self, tokens: int) -> None:
        """A trajectory of this many sampled tokens has ended."""
        self._ended += 1
        if tokens > 0:
            self._lengths.append(tokens)

    def decide(self, now_s: float, tokens: int, held: int) -> int:
        """Return the slots from now on.

        Args:
            now_s: a moment of a clock.
            tokens: that the worker has sampled so far.
            held: trajectories that the worker has.
        """
        self._follow_bound()
        if held < 0.9 * self.slots:  # the slots do not limit the rate
            self._window = None
        elif self._window is None:
            self._window, self._ended = (now_s, tokens), 0
        elif self._ended >= _WINDOW_ENDS * self.slots and now_s - self._window[0] >= _WINDOW_S:
            began_s, before = self._window
            self._window = None
            self._change((tokens - before) / (now_s - began_s))
        return self.slots

    def _follow_bound(self) -> None:
        if len(self._lengths) >= _ENOUGH:
            sigma = statistics.pstdev(map(math.log, self._lengths))
            if self._sigma is None or abs(sigma - self._sigma) > 0.1:
                self._sigma = sigma
        most = max(self._least, self._bound(self._sigma))
        if most == self._most:
            return
        unlimited = self.slots < self._most
        self._most = most
        if not unlimited or self.slots > most:
            self._begin(most)

    def _begin(self, slots: int) -> None:
        self.slots, self._known, self._window = slots, None, None

    def _change(self, rate: float) -> None:
        """Judge the last change by the rate since then, and begin the next one."""
        if self._known is not None:
            slots, before = self._known
            if rate < before * (_SAME if self._down else _FASTER):
                self._begin(slots)
                self._down = not self._down
                self._rest, self._resting = min(_LONGEST_REST, 2 * self._rest), self._rest
                return
            self._rest, self._resting = 1, 0
        if self._resting > 0:
            self._resting -= 1
            return
        self._known = (self.slots, rate)
        if self._stepped() == self.slots:
            self._down = not self._down
        self.slots = self._stepped()

    def _stepped(self) -> int:
        if self._down:
            return max(self._least, math.floor(self.slots * _DOWN))
        return min(self._most, math.ceil(self.slots * _UP))
