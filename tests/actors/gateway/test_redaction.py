"""What a function of the user's redacts is stored nowhere as it was; a turn that it fails for is not stored."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import read
from asyncrl.bus.server import EmbeddedServer
from asyncrl.config.check_live import live_contradictions
from asyncrl.config.settings import Config
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.live.redaction import RedactionFailed, Redactor
from asyncrl.live.stored import TurnReader
from harness.gateways import gateway, stored_turns
from harness.live_runs import conversing_model
from harness.sdks import sdks
from harness.sglang_like import Asked, LikeSGLang
from harness.stage import Stage, until
from topics.turns import FEEDBACK_GIVEN, FeedbackGiven, TurnFinished, TurnStarted

HOOK = """
def redact(texts):
    if any("break" in text for text in texts):
        raise ValueError(texts)
    return [text.replace("4711-0815", "(number)") for text in texts]
"""
PLANTED = "4711-0815"
WAITS = """
import os, time

HERE = os.path.dirname(__file__)

def redact(texts):
    if any("4711" in text for text in texts):
        open(f"{HERE}/waits-{os.getpid()}", "w").close()
        while not os.path.exists(f"{HERE}/go"):
            time.sleep(0.01)
    return [text.replace("4711-0815", "0000-0000") for text in texts]
"""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_a_redacted_turn_is_served_as_it_was_and_stored_redacted(
    bus: Bus, server: EmbeddedServer, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    (tmp_path / "hook.py").write_text(HOOK)
    model = tmp_path / "model"

    async def serve(asked: Asked) -> dict[str, Any]:
        ends = tokenizer.decode_all(asked.ids).endswith("tell")
        reply = tokenizer.encode(f"it is {PLANTED}." if ends else "ok").tolist()
        return inference.answer(asked, [*reply, tokenizer.eos_ids[0]], "stop")

    inference.serve = serve
    live = {"redact": f"{tmp_path}/hook.py:redact", "redact_s": 60.0}
    async with gateway(bus, stage, model, inference, tools=True, live=live) as served:
        tokenizer = TaskTokenizer.load(model)
        ask: dict[str, Any] = {"model": "any", "max_tokens": 50}
        async with sdks(served.address, served.key) as (_, second), ClientSession() as http:
            messages = [user("abc")]
            for text in (f"mine is {PLANTED}", "thanks"):
                reply = await second.messages.create(messages=messages, **ask)
                messages += [{"role": "assistant", "content": reply.content[0].text}, user(text)]
            await second.messages.create(messages=messages, **ask)
            told = await second.messages.create(messages=[user("tell")], **ask)
            assert (await second.messages.create(messages=[user("break")], **ask)).content[0].text == "ok"
            body = {"turn": told.id, "thumb": "up", "text": f"is {PLANTED}"}
            sent = await http.post(
                f"{served.address}/v1/feedback", json=body, headers={"Authorization": f"Bearer {served.key}"}
            )
            assert sent.status == 200 and (await sent.json())["text"] == f"is {PLANTED}"
        assert served.count("redactions_failed") == 1
    facts = await stored_turns(bus)
    begun = [fact for fact in facts if isinstance(fact, TurnStarted)]
    ended = [fact for fact in facts if isinstance(fact, TurnFinished)]
    assert len(begun) == len(ended) == 4 and told.content[0].text == f"it is {PLANTED}."
    # The turn behind a redacted one has all of it in its own prompt, and is redacted, too.
    assert [turn.parent for turn in begun] == ["", begun[0].turn_id, "", ""]
    assert [turn.skip for turn in begun] == [None, "redacted", "redacted", None]
    assert [bool(turn.digest) for turn in begun] == [True, False, False, True]
    assert [bool(turn.history) for turn in ended] == [True, False, False, False]
    assert [turn.marks for turn in ended] == [[], [], [], ["redacted"]]
    stored = [
        tokenizer.decode_all(fact.tokens.tolist()) for fact in facts if isinstance(fact, TurnStarted | TurnFinished)
    ]
    assert [text.count("(number)") for text in stored] == [0, 0, 1, 0, 1, 0, 0, 1] and PLANTED not in "".join(stored)
    assert [tokenizer.decode_all(one.ids).count(PLANTED) for one in inference.asked] == [0, 1, 1, 0, 0]
    before = (await TurnReader(bus).read(begun[1].turn_id)).prompt[: begun[1].known]
    assert before.tolist() == inference.asked[1].ids[: begun[1].known]
    record = await read_last(bus, FEEDBACK_GIVEN, begun[3].turn_id)
    assert record is not None and (await read(bus, FeedbackGiven, record)).text == "is (number)"
    raw = [tokenizer.encode(PLANTED).tobytes(), PLANTED.encode()]
    files = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and not file.name.startswith("hook.")]
    assert files and not any(one in content for content in files for one in raw)


async def test_a_function_that_hangs_gives_no_text(tmp_path: Path):
    (tmp_path / "hook.py").write_text("import time\ndef redact(texts):\n    time.sleep(600)\n")
    tokenizer = TaskTokenizer.load(conversing_model(tmp_path / "model"))
    redactor = await Redactor.open("hook.py:redact", base=tmp_path, limit_s=0.2, tokenizer=tokenizer)
    try:
        with pytest.raises(RedactionFailed, match=r"hook\.py:redact failed: time"):
            await redactor.texts([PLANTED])
    finally:
        await redactor.close()


async def test_no_turn_follows_one_that_is_about_to_be_redacted(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    (tmp_path / "hook.py").write_text(WAITS)
    model = tmp_path / "model"

    async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        yield inference.answer(asked, [*tokenizer.encode(PLANTED).tolist(), tokenizer.eos_ids[0]], "stop")

    inference.events = events
    live = {"redact": f"{tmp_path}/hook.py:redact", "redact_s": 60.0}
    async with gateway(bus, stage, model, inference, tools=True, live=live) as served:
        tokenizer = TaskTokenizer.load(model)
        ask: dict[str, Any] = {"model": "any", "max_tokens": 50}

        async def follow() -> None:
            messages = [user("abc"), {"role": "assistant", "content": PLANTED}, user("def")]
            async with second.messages.stream(messages=messages, **ask) as stream:
                await stream.get_final_message()

        async with sdks(served.address, served.key) as (_, second):
            async with second.messages.stream(messages=[user("abc")], **ask) as stream:
                told = ""
                async for text in stream.text_stream:
                    if (told := told + text) == PLANTED:
                        break
                await until(lambda: len(list(tmp_path.glob("waits-*"))) == 1, "its end is looked at")
                following = asyncio.create_task(follow())
                looked = lambda: len(list(tmp_path.glob("waits-*"))) == 2  # noqa: E731 - read twice, here alone
                await until(lambda: looked() or len(inference.asked) == 2, "the next turn has begun")
                (tmp_path / "go").touch()
                await stream.get_final_message()
            await following
    begun = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert [(turn.parent, turn.known, turn.skip) for turn in begun] == [("", 0, None), ("", 0, "redacted")]


@pytest.mark.parametrize(
    ("live", "words"),
    [({"redact": "words"}, "expected path/to/file.py:function"), ({"redact_s": 2.0}, "live.redact names no function")],
)
def test_settings_that_redact_nothing_are_found(live: dict[str, Any], words: str):
    config = Config()
    config.gateway.count = 1
    for key, value in live.items():
        setattr(config.live, key, value)
    assert any(words in finding.message for finding in live_contradictions(config))
