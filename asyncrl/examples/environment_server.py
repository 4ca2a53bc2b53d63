"""A server with the protocol of OpenEnv for a class of kind `text`: `python environment_server.py FILE.py:CLASS PORT`.

Each WebSocket at `/ws` is one session with its own object.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import WSMsgType, web


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


def class_at(spec: str) -> Callable[[], Any]:
    """Return the class that `FILE.py:CLASS` names."""
    file, _, name = spec.rpartition(":")
    found = importlib.util.spec_from_file_location(Path(file).stem, file)
    if found is None or found.loader is None:
        raise SystemExit(f"{spec}: expected FILE.py:CLASS")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    made: Callable[[], Any] = getattr(module, name)
    return made


if __name__ == "__main__":
    web.run_app(application(class_at(sys.argv[1])), host="127.0.0.1", port=int(sys.argv[2]))
