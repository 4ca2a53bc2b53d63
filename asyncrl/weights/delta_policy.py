"""The choice between a full version and its difference to the one before: by what each of them took."""

from __future__ import annotations

import msgspec

from topics.engines import EngineReady
from topics.weights import WeightsPublished

_AGAIN = 64  # versions after which the slower kind is tried again


class Costs(msgspec.Struct):
    """Seconds of the newest full version and of the newest difference, and the versions since then."""

    written: dict[bool, float] = {}  # until it was announced, by whether it is a difference
    loaded: dict[bool, dict[str, float]] = {}  # from there until it was loaded, by engine
    since: dict[bool, int] = {}  # versions since the newest one of a kind

    def add_published(self, version: WeightsPublished) -> None:
        """Take note of an announcement."""
        delta = bool(version.base)
        self.written[delta] = version.write_s + (version.encode_s if delta else 0.0)
        self.since = {kind: count + 1 for kind, count in self.since.items()} | {delta: 0}

    def add_loaded(self, ready: EngineReady) -> None:
        """Take note of a confirmation."""
        self.loaded.setdefault(ready.delta, {})[ready.engine_id] = ready.fetch_s + ready.update_s

    def of(self, delta: bool) -> float | None:
        """Return the seconds of a kind, to the slowest engine; None if it was not tried."""
        if delta not in self.written:
            return None
        return self.written[delta] + max(self.loaded.get(delta, {}).values(), default=0.0)

    def full_because(self) -> str:
        """Return why the next version should be full; empty where a difference wins, or is to be tried."""
        full, delta = self.of(False), self.of(True)
        if full is None:
            return "no full one was measured"
        if delta is None or delta < full or self.since[True] >= _AGAIN:
            return ""
        return f"a difference took {delta:.3f} s until the slowest engine had it, a full version {full:.3f} s"
