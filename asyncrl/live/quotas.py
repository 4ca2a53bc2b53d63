"""Usage of tenants, folded from their stored requests, and the limits of their keys."""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict

from asyncrl.live.apis.schema import LiveError
from topics.keys import KeyAdded, TurnCounted

MINUTE_S, DAY_S = 60.0, 86_400.0
_OTHER_DAYS = 2


class Usage:
    """Requests of the last minute, and tokens of the day (UTC), by tenant: of ended requests, and of those here."""

    def __init__(self) -> None:
        self._begun: defaultdict[str, list[float]] = defaultdict(list)  # when requests of the last minute began
        self._tokens: defaultdict[int, Counter[str]] = defaultdict(Counter)  # by day, since 1970

    def take(self, counted: TurnCounted, *, known: bool = False) -> None:
        """Fold in a request that has ended.

        Args:
            known: it began here, so `begin` has counted it.
        """
        self._tokens[int(counted.begun_s // DAY_S)][counted.tenant] += counted.tokens
        if not known:
            begun = self._begun[counted.tenant]
            bisect.insort(begun, counted.begun_s)
            del begun[: bisect.bisect_right(begun, begun[-1] - MINUTE_S)]  # the tenant may never ask this gateway

    def begin(self, key: KeyAdded, now_s: float) -> None:
        """Count a request that begins.

        Args:
            now_s: seconds since 1970.

        Raises:
            LiveError: its key's limit is reached.
        """
        today = self._turn_to(now_s)
        begun = self._begun[key.tenant]
        del begun[bisect.bisect_right(begun, now_s) :]  # of a clock that was ahead, and was set back
        del begun[: bisect.bisect_right(begun, now_s - MINUTE_S)]
        most = key.requests_per_minute
        if most and len(begun) >= most:
            wait_s = math.ceil(begun[len(begun) - most] + MINUTE_S - now_s)
            words = f"{key.tenant} has made {len(begun)} requests in the last minute; this key allows {most}"
            raise LiveError("limited", f"{words}: try again in {wait_s} s", retry_s=max(wait_s, 1))
        used, most = self._tokens[today][key.tenant], key.tokens_per_day
        if most and used >= most:
            wait_s = math.ceil((today + 1) * DAY_S - now_s)
            words = f"{key.tenant} has used {used:,} tokens today (UTC); this key allows {most:,}"
            raise LiveError("limited", f"{words}: try again in {wait_s} s", retry_s=max(wait_s, 1))
        begun.append(now_s)

    def _turn_to(self, now_s: float) -> int:
        """Return today, and forget all but a few other days: they return with a clock that was temporarily wrong."""
        today = int(now_s // DAY_S)
        for day in sorted(self._tokens.keys() - {today})[:-_OTHER_DAYS]:
            del self._tokens[day]
        return today
