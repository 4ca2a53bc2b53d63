"""Usage of each API key, folded from the stored turns and the sizes of private requests."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import Record
from asyncrl.bus.merged_reader import Part, read_merged
from topics.keys import TURN_COUNTED, TurnCounted
from topics.topic import TURNS, Topic
from topics.turns import TURN_FINISHED, TURN_STARTED, TurnFinishedHeaders, TurnStartedHeaders


class KeyUsage(msgspec.Struct):
    """Replies to requests with one key."""

    replies: int = 0
    tokens: int = 0  # of prompts and replies
    last_ns: int = 0  # since 1970, begin or end of the newest


class _Fold:
    def __init__(self) -> None:
        self.keys: defaultdict[str, KeyUsage] = defaultdict(KeyUsage)
        self._key_of: dict[str, str] = {}  # by turn

    def take(self, _topic: Topic[Any], message: Any, record: Record) -> None:
        turn = message.turn_id
        if isinstance(message, TurnStartedHeaders):
            self._key_of[turn] = message.api_key
            self._add(message.api_key, 1, message.prompt_tokens, record)
        elif isinstance(message, TurnFinishedHeaders):
            self._add(self._key_of.get(turn, ""), 0, message.length, record)
        elif isinstance(message, TurnCounted) and turn not in self._key_of:  # nothing else is stored of it
            self._add(message.api_key, message.replies, message.tokens, record)

    def _add(self, key: str, replies: int, tokens: int, record: Record) -> None:
        usage = self.keys[key]
        usage.replies, usage.tokens, usage.last_ns = usage.replies + replies, usage.tokens + tokens, record.time_ns


async def read_key_usage(bus: Bus) -> dict[str, KeyUsage]:
    """Return the usage of each key by its id; under "" that of turns which name no key.

    Raises:
        BusGone: the server sends nothing more.
    """
    fold = _Fold()
    turns = [topic.pattern(bus.run) for topic in (TURN_STARTED, TURN_FINISHED)]
    parts = [Part(TURNS, subjects=turns, headers_only=True), Part(TURNS, subjects=[TURN_COUNTED.pattern(bus.run)])]
    await read_merged(bus, parts, fold.take, lambda *_: None)
    return fold.keys
