"""Routes for operators, load balancers and browsers: readiness, metrics, the OpenAPI document, CORS, the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from actors.gateway.reply import Answered, refuse
from actors.runtime.actor import Context
from asyncrl.live.apis.schema import LiveError
from asyncrl.live.keys import Keys
from asyncrl.live.openapi import openapi_document
from asyncrl.live.sessions import SESSION_HEADER, TURN_HEADER

_PAGE = Path(__file__).with_name("page.html")
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_METHODS = "GET, POST, DELETE"
_EXPOSED = ", ".join(("request-id", "x-request-id", "Retry-After", SESSION_HEADER, TURN_HEADER))
_PREFLIGHT_S = "600"  # for which a browser remembers an answer
_CONTINUE = "100-continue"


class Operations:
    """Answers that need no engine."""

    def __init__(self, context: Context, keys: Keys, unready_s: Callable[[], float]) -> None:
        """
        Args:
            unready_s: returns for how many seconds no engine was ready; 0 if one is ready.
        """
        self._context = context
        self._settings = context.config.gateway
        self._keys = keys
        self._unready_s = unready_s

    def routes(self) -> Iterator[web.RouteDef]:
        """Return its routes."""
        yield self.get("/health", self._health)
        yield self.get("/ready", self._ready)
        yield self.get("/metrics", self._metrics)
        yield self.get("/openapi.json", self._openapi)
        if self._settings.page:
            yield self.get("/", self._page)

    def get(self, path: str, handler: Answered) -> web.RouteDef:
        """Return the route of a GET."""
        return web.get(path, handler, expect_handler=self.expect)

    def cors(self) -> Middleware:
        """Return what answers the preflight requests of browsers from `gateway.origins`."""

        @web.middleware
        async def cors(request: web.Request, handler: Answered) -> web.StreamResponse:
            asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
            if not (asks and self._origin(request)):
                return await handler(request)
            wanted = request.headers.get("Access-Control-Request-Headers", "*")
            headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Allow-Headers": wanted}
            return web.Response(status=204, headers={**headers, "Access-Control-Max-Age": _PREFLIGHT_S})

        return cors

    async def add_cors(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let pages of `gateway.origins` read a response."""
        if origin := self._origin(request):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED
            response.headers["Vary"] = "Origin"

    def _origin(self, request: web.Request) -> str:
        """Return the origin of a browser's page that may read answers; "" for none."""
        origin, allowed = request.headers.get("Origin", ""), self._settings.origins
        return origin if origin and ("*" in allowed or origin in allowed) else ""

    async def expect(self, request: web.Request) -> web.StreamResponse | None:
        """Answer `Expect: 100-continue`, after a look at the key: without one, no client sends its body.

        Raises:
            web.HTTPExpectationFailed: the request expects something else.
        """
        if request.headers.get("Expect", "").lower() != _CONTINUE:
            raise web.HTTPExpectationFailed(text="expected Expect: 100-continue")
        try:
            self._keys.key(request.headers)
        except LiveError as error:
            self._context.count("requests_refused")
            answer = refuse(request, error)
            answer.force_close()  # what follows may be its body
            return answer
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer follows
        return None

    async def _health(self, _http: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def _ready(self, _http: web.Request) -> web.StreamResponse:
        """Say whether a new request would be answered: it waits `gateway.queue_timeout_s` for an engine."""
        stops, unready_s = self._context.stop.is_set(), self._unready_s()
        if stops or unready_s > self._settings.queue_timeout_s:
            reason = "the gateway stops" if stops else "no engine is ready"
            return web.json_response({"status": "unavailable", "reason": reason}, status=503)
        return web.json_response({"status": "ok"})

    async def _metrics(self, http: web.Request) -> web.StreamResponse:
        """Print the vital signs of this process in the text format of Prometheus."""
        self._keys.key(http.headers)
        values = {**self._context.vitals, "ready": float(self._unready_s() <= self._settings.queue_timeout_s)}
        label = f'{{gateway="{self._context.actor_id}"}}'
        lines = [f"asyncrl_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}{label} {values[name]:.10g}" for name in sorted(values)]
        return web.Response(text="\n".join(lines) + "\n", headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _openapi(self, _http: web.Request) -> web.StreamResponse:
        return web.Response(body=self._document, content_type="application/json")

    @cached_property
    def _document(self) -> bytes:
        return msgspec.json.encode(openapi_document())

    async def _page(self, _http: web.Request) -> web.StreamResponse:
        return web.Response(text=_PAGE.read_text(encoding="utf-8"), content_type="text/html", headers=_PAGE_HEADERS)
