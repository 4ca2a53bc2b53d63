"""A chat endpoint of OpenAI's API that answers as a test says."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from aiohttp import web

Answer = Callable[[web.Request, str], Any]


def completion(content: Any) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}]})


class Endpoint:
    """Gives its answers in turn, each with the mark of the question; the last one stays."""

    def __init__(self, *answers: Answer) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._answers = answers

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        self.bodies.append(msgspec.json.decode(await http.read()))
        self.headers.append(dict(http.headers))
        mark = re.findall(r"(?:VOTE|CRITERION|BETTER) ([0-9a-f]{16})", self.bodies[-1]["messages"][0]["content"])[0]
        answer = self._answers[min(len(self.bodies), len(self._answers)) - 1](http, mark)
        return await answer if asyncio.iscoroutine(answer) else answer

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Listen; gives the address up to and with `/v1`."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()
