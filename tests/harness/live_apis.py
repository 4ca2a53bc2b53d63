"""The APIs of the gateway served over real HTTP, with replies that are given."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web

from asyncrl.live.apis.registry import APIS
from asyncrl.live.apis.schema import Api, Ending, LiveError, Opening

OPENING = Opening("t1", "tiny", 1_700_000_000, 7)


def parsed_events(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return names and data of server-sent events; "[DONE]" is left out."""
    found = []
    for block in raw.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if lines and lines["data"] != "[DONE]":
            found.append((lines.get("event", ""), msgspec.json.decode(lines["data"])))
    return found


@contextlib.asynccontextmanager
async def served(pieces: list[str], ending: Ending, *, fails: LiveError | None = None) -> AsyncIterator[str]:
    """Serve all APIs with one reply, streamed in pieces; where it fails, behind them."""

    def handler(api: Api) -> Any:
        async def handle(http: web.Request) -> web.StreamResponse:
            try:
                request = api.parse(await http.read())
            except LiveError as error:
                status, body = api.error(error, "t1")
                return web.json_response(body, status=status)
            if not request.stream:
                return web.json_response(api.whole(OPENING, request, [ending]))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(http)
            events = api.events(OPENING, request)
            await response.write(events.begin())
            for piece in pieces:
                await response.write(events.alive() + events.text(piece))
            await response.write(events.fail(fails) if fails else events.end(ending) + events.done([ending]))
            return response

        return handle

    app = web.Application()
    app.add_routes([web.post(api.path, handler(api)) for api in APIS.values()])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
