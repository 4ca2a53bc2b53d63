"""Options of all requests to servers, and how many tokens of their streams come at a time."""

from __future__ import annotations

from typing import NamedTuple

QUIET_TOKENS = 64  # longer generations are streamed, so that one sees them advance
_STREAM_INTERVAL = 16
_ENOUGH = 16  # tokens of a generation whose time shows the speed
_MOST = 64  # that come at a time
_NEWEST = 0.2  # weight of the newest generation in the mean


class RequestOptions(NamedTuple):
    """Options of all requests to servers."""

    portion: int = QUIET_TOKENS  # greatest number of tokens between two calls of `Watch.on_tokens`, but for `event_s`
    in_place: bool = False  # engines take new weights under requests that run
    seeded: bool = False  # servers draw by the seed of each generation, not by a server seed
    routed: bool = False  # servers return the experts of each token
    unrouted: bool = False  # an answer without them, or with others than they should be, is one, too
    priority: int = 0  # of all requests, see `SamplingParams`
    event_s: float = 0.0  # seconds of sampling between two such calls, if longer, at the speed of earlier generations


class Pace:
    """Tokens between two events of a stream.

    An event costs server and client the same with one token and with many. On shared cores each event also wakes the
    client while the server could continue. So events of fast servers are further apart by tokens, not by time.
    """

    def __init__(self, manner: RequestOptions) -> None:
        # No client reads the streams of rollouts, whose events then only bound the loss with a worker. Tokens of an
        # event have one label, so that events are short where weights change under requests.
        interval = _STREAM_INTERVAL if manner.event_s or manner.in_place else QUIET_TOKENS
        self._tokens = self._least = min(interval, manner.portion)
        self._event_s = manner.event_s
        self._token_s = 0.0  # mean of the generations before

    def tokens(self, most: int) -> int:
        """Return the tokens per event of a stream of at most this many tokens.

        Where a client reads it they are fewer than all: else its first token would come with the last.
        """
        return min(self._tokens, max(1, most - 1)) if self._event_s else self._tokens

    def generated(self, tokens: int, seconds: float) -> None:
        """Take note of a generation."""
        if tokens < _ENOUGH or not self._event_s:
            return
        found = seconds / tokens
        self._token_s += (found - self._token_s) * (_NEWEST if self._token_s else 1.0)
        self._tokens = max(self._least, min(int(self._event_s / max(self._token_s, 1e-6)), _MOST))
