"""Routes of a gateway for operators, load balancers and browsers."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import ClientSession

from actors.gateway.operations import Operations
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from harness.gateways import Served, gateway, gateway_stage, ready
from harness.sglang_like import LikeSGLang
from harness.stage import Stage, until
from topics.engines import EngineGone

ORIGIN = "https://chat.example.org"
BODY = {"model": "any", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}
PATH = "/v1/chat/completions"


@pytest.fixture
async def served(bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path) -> AsyncIterator[Served]:
    async with gateway(bus, stage, tmp_path / "model", inference, origins=[ORIGIN]) as served:
        yield served


async def said(served: Served, raw: bytes) -> bytes:
    """Send bytes, and return the head of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.context.config.gateway.port)
    writer.write(raw)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    writer.close()
    return head


async def test_a_gateway_is_ready_while_an_engine_answers_and_healthy_in_any_case(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with (
        gateway(bus, stage, tmp_path / "model", inference, queue_timeout_s=0.2) as served,
        ClientSession(served.address) as client,
    ):

        async def answers(status: int) -> bool:
            async with client.get("/ready") as answer:
                return answer.status == status

        await until(lambda: answers(200), "an engine is ready")
        await publish(bus, EngineGone("engine-1", "it ended"))
        await until(lambda: answers(503), "no engine is ready")
        async with client.get("/health") as answer:
            assert answer.status == 200
        await publish(bus, ready(inference))
        await until(lambda: answers(200), "an engine is ready again")


async def test_a_gateway_without_an_engine_is_not_ready(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    served = Served(bus, gateway_stage(stage, tmp_path / "model", inference))
    await served.start()
    async with ClientSession(served.address) as client, client.get("/ready") as answer:
        assert (answer.status, (await answer.json())["reason"]) == (503, "no engine is ready")
    await served.stop()


async def test_pages_of_the_named_origins_may_call_the_apis_and_others_may_not(served: Served):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    async with ClientSession(served.address) as client:
        async with client.options(PATH, headers={"Origin": ORIGIN, **asks}) as answer:
            assert answer.status == 204
            assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
            assert answer.headers["Access-Control-Allow-Headers"] == asks["Access-Control-Request-Headers"]
        async with client.options(PATH, headers={"Origin": "https://evil.example.org", **asks}) as answer:
            assert answer.status == 404 and "Access-Control-Allow-Origin" not in answer.headers
        for stream in (False, True):
            headers = {"Origin": ORIGIN, "x-api-key": served.key}
            async with client.post(PATH, json=BODY | {"stream": stream}, headers=headers) as answer:
                assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (200, ORIGIN)
                assert "x-asyncrl-turn" in answer.headers["Access-Control-Expose-Headers"]


async def test_metrics_take_a_key_and_count_turns(served: Served):
    async with ClientSession(served.address) as client:
        async with client.get("/metrics") as answer:
            assert answer.status == 401
        headers = {"Authorization": f"Bearer {served.key}"}
        async with client.post(PATH, json=BODY, headers=headers) as answer:
            assert answer.status == 200
        async with client.get("/metrics", headers=headers) as answer:
            lines = dict(line.rsplit(" ", 1) for line in (await answer.text()).splitlines())
    assert lines['asyncrl_turns{gateway="gateway-1"}'] == lines['asyncrl_ready{gateway="gateway-1"}'] == "1"


async def test_the_openapi_document_has_exactly_the_routes_of_the_gateway(served: Served):
    async with ClientSession(served.address) as client, client.get("/openapi.json") as answer:
        paths = (await answer.json())["paths"]
    documented = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    app = served.gateway._application()
    routes = {
        (route.method, (route.resource.canonical if route.resource else ""))
        for route in app.router.routes()
        if route.method not in ("*", "HEAD")
    }
    assert documented == routes


async def test_headers_that_are_too_long_are_a_431_and_a_bad_key_is_refused_before_its_body(served: Served):
    host = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
    assert (await said(served, host + b"X-A: " + b"a" * 9000 + b"\r\n\r\n")).startswith(b"HTTP/1.0 431 ")
    asks = b"Content-Length: %d\r\nExpect: 100-continue\r\n" % len(json.dumps(BODY))
    assert (await said(served, host + asks + b"x-api-key: no\r\n\r\n")).startswith(b"HTTP/1.1 401 ")
    key = f"x-api-key: {served.key}\r\n\r\n".encode()
    assert (await said(served, host + asks + key)).startswith(b"HTTP/1.1 100 ")


def test_the_page_names_no_other_server():
    page = Path(Operations.__init__.__code__.co_filename).with_name("page.html").read_text()
    assert "http://" not in page and "https://" not in page and "src=" not in page
