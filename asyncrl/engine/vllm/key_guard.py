"""Asks for the key of a server that the run has started, at every path but /health.

vLLM guards its paths below /v1 and /inference. Those that load weights and end requests would be open to all users of
the machine. vLLM's process imports this module.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from asyncrl.engine.vllm.arguments import KEY_FILE

_Call: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[None]]
_Receive: TypeAlias = Callable[[], Awaitable[Mapping[str, Any]]]
_App: TypeAlias = Callable[[Mapping[str, Any], _Receive, _Call], Awaitable[None]]


class KeyGuard:
    """ASGI middleware."""

    def __init__(self, app: _App) -> None:
        self._app = app
        self._wanted = b"Bearer " + Path(os.environ[KEY_FILE]).read_bytes().strip()

    async def __call__(self, scope: Mapping[str, Any], receive: _Receive, send: _Call) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b"the request has not the key of this server"})
                return
        await self._app(scope, receive, send)
