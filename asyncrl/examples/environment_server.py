"""A server with the protocol of OpenEnv for a class of kind `text`: `python environment_server.py FILE.py:CLASS PORT`.

Each WebSocket at `/ws` is one session with its own object.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from asyncrl.functions import load_function


def application(made: Callable[[], Any]) -> web.Application:
    """Return the server.

    Args:
        made: makes an object with `reset(seed=)` and `step(text)`.
    """

    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket, played = web.WebSocketResponse(), made()
        await socket.prepare(request)
        async for message in socket:
            if message.type != WSMsgType.TEXT:
                break
            asked = msgspec.json.decode(message.data)
            try:
                answer = {"type": "observation", "data": await asyncio.to_thread(_answer, played, asked)}
            except Exception as error:  # noqa: BLE001 - the client reads what an environment raised
                answer = {"type": "error", "data": {"message": f"{type(error).__name__}: {error}"}}
            await socket.send_str(msgspec.json.encode(answer).decode())
        return socket

    async def health(_request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    app = web.Application()
    app.add_routes([web.get("/ws", serve), web.get("/health", health)])
    return app


def _answer(played: Any, asked: dict[str, Any]) -> dict[str, Any]:
    if asked["type"] == "reset":
        observation, _ = played.reset(seed=asked["data"].get("seed", 0))
        return {"observation": {"message": observation}, "reward": None, "done": False}
    observation, reward, terminated, truncated, _ = played.step(asked["data"]["message"])
    return {"observation": {"message": observation}, "reward": reward, "done": terminated or truncated}


if __name__ == "__main__":
    web.run_app(application(load_function(sys.argv[1], base=Path())), host="127.0.0.1", port=int(sys.argv[2]))
