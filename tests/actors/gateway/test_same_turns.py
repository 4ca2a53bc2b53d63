"""A header from which the keeper of sessions, and nobody else, learns that a turn repeats another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.bus.connection import Bus
from harness.gateways import gateway, stored_turns
from harness.sdks import sdks
from harness.sglang_like import LikeSGLang
from harness.stage import Stage
from topics.turns import TurnFinished


async def test_turns_of_one_user_with_one_prompt_and_reply_are_the_same_and_those_of_another_are_not(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    ask: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (first, _),
    ):
        texts = [(await first.chat.completions.create(**ask)).choices[0].message.content for _ in range(2)]
        texts += [(await first.chat.completions.create(**ask, user="u2")).choices[0].message.content]
        private = {"x-asyncrl-private": "1"}
        await first.chat.completions.create(**ask, extra_headers=private)
        ended = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnFinished)]
    assert len(set(texts)) == 1  # one reply for all of them
    assert ended[0].same == ended[1].same != "" and ended[2].same not in ("", ended[0].same)
    assert len(ended) == 3
