"""What the gateway itself fails at costs its request alone, and its log quotes nothing that was said."""

import asyncio
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import ClientError, ClientSession

from asyncrl.bus.connection import Bus
from asyncrl.live.reply_parser import ReplyParts
from harness.gateways import gateway
from harness.sglang_like import LikeSGLang
from harness.stage import Stage

PLANTED = "quaggamarzipan"


async def test_a_fault_of_the_gateway_is_logged_without_its_words_and_the_others_go_on(
    bus: Bus,
    stage: Callable[..., Stage],
    inference: LikeSGLang,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    def fails(_parts: ReplyParts) -> list[str]:
        raise ValueError(f"cannot end {PLANTED}")

    ask = {"model": "any", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        ClientSession(f"{served.address}/", headers={"x-api-key": served.key}) as http,
    ):
        with monkeypatch.context() as broken:
            broken.setattr(ReplyParts, "end", fails)
            async with http.post(f"v1/chat/completions?{PLANTED}", json=ask) as whole:
                assert whole.status == 500 and PLANTED not in await whole.text()
            with pytest.raises(ClientError):  # the connection is cut
                async with http.post("v1/messages", json=ask | {"stream": True}) as stream:
                    assert stream.status == 200
                    await stream.read()
        async with http.post("v1/messages", json=ask) as after:
            assert after.status == 200
        assert served.count("requests_broken") == 2
    logged = "".join(capfd.readouterr()) + caplog.text
    assert logged.count('"event": "a request fails"') == 2 and "test_broken_requests.py" in logged
    assert PLANTED not in logged


async def test_what_cannot_be_read_as_http_is_refused_and_not_quoted(
    bus: Bus,
    stage: Callable[..., Stage],
    inference: LikeSGLang,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    logged = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(logged)])
    async with gateway(bus, stage, tmp_path / "model", inference) as served:
        long = f"x: {PLANTED}{'a' * 9000}"
        for line, said in (
            (f"{PLANTED} 1", "malformed"),
            (f"x {PLANTED}: a", "malformed"),
            (f"Content-Length: {PLANTED}", "malformed"),
            (long, "too long"),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(served.address.rpartition(":")[2]))
            writer.write(f"POST /v1/messages HTTP/1.1\r\n{line}\r\n\r\n".encode())
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.0 431" if line is long else b"HTTP/1.0 400")
            error = json.loads(body)
            assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
            assert said in error["error"]["message"] and PLANTED not in body.decode()
            assert f"request-id: {error['request_id']}\r\n".encode() in head
            writer.close()
    assert PLANTED not in logged.getvalue()
