"""Conversations of a tenant as text, and the usage of its key."""

from collections.abc import Callable
from pathlib import Path

from aiohttp import ClientSession

from asyncrl.bus.connection import Bus
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.live.exported import exported_turns
from asyncrl.live.key_usage import read_key_usage
from harness.gateways import gateway
from harness.sglang_like import LikeSGLang
from harness.stage import Stage

PATH = "/v1/chat/completions"


async def test_the_turns_of_a_tenant_have_their_texts_versions_and_feedback_and_its_key_their_sizes(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with gateway(bus, stage, tmp_path / "model", inference) as served:
        headers = {"x-api-key": served.key}
        async with ClientSession(served.address, headers=headers) as client:
            messages, usages = [{"role": "user", "content": "abc"}], []
            for _ in range(2):
                body = {"model": "any", "messages": messages, "max_tokens": 4}
                async with client.post(PATH, json=body) as answer:
                    reply = await answer.json()
                usages.append(reply["usage"]["total_tokens"])
                messages += [reply["choices"][0]["message"], {"role": "user", "content": "cba"}]
                assert reply["system_fingerprint"] == "v0"
            async with client.post("/v1/feedback", json={"turn": reply["id"], "number": 0.5, "text": "so"}) as answer:
                assert answer.status == 200
            private = {"x-asyncrl-private": "1"}
            async with client.post(PATH, json=body | {"n": 2}, headers=private) as answer:
                usage = (await answer.json())["usage"]
                usages.append(usage["prompt_tokens"] + usage["total_tokens"])  # each reply counts its prompt
        text_of = TaskTokenizer.load(tmp_path / "model").decode_all
        exported = await exported_turns(bus, "anna", text_of)
        first, second = exported.turns
        assert (first.parent, second.parent, exported.unreadable) == ("", first.turn, 0)
        assert first.prompt == "abc" and second.prompt.endswith("cba")
        assert first.reply.startswith(messages[1]["content"]) and first.versions == second.versions == [0]
        assert [(one.score, one.text) for one in second.feedback] == [(0.5, "so")] and not first.feedback
        assert not (await exported_turns(bus, "ben", text_of)).turns
        (used,) = (await read_key_usage(bus)).values()
        assert (used.replies, used.tokens) == (4, sum(usages))
