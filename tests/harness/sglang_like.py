"""A real HTTP server that answers as SGLang 0.5.17 does, by a script: no model, tokens counted up, log-probs of -1."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from asyncrl.ports import free_port

PAUSED_HEALTH_S = 20.0  # until a paused server answers that it is not well


class Fault(Exception):
    """A request that this server cannot serve: the HTTP status, or the code of an event, and its words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass
class Asked:
    """One generation of a /generate call."""

    ids: list[int]
    sampling: dict[str, Any]
    rid: str
    together: int  # prompts of the same HTTP request
    index: int = 0  # its place among them
    streamed: bool = False
    cumulative: list[int] = field(default_factory=list)
    extra_key: str = ""
    adapter: str = ""  # that it names
    bootstrap: dict[str, Any] = field(default_factory=dict)  # of a prefill and a decode server

    def tokens(self, count: int | None = None) -> list[int]:
        """As many tokens as were asked for, counted up from the last of the prompt."""
        return [(self.ids[-1] + number) % 30 + 3 for number in range(1, (count or self.limit) + 1)]

    @property
    def limit(self) -> int:
        return int(self.sampling["max_new_tokens"])


Serve = Callable[[Asked], Awaitable[dict[str, Any]]]


class LikeSGLang:
    """Requests to the server and commands for it; `serve` gives the answer to one generation, or raises a `Fault`."""

    def __init__(self) -> None:
        self.address = ""
        self.runner: web.AppRunner
        self.weight_version, self.model_path = "default", "base"
        self.key = ""  # asked for everywhere but /health, where there is one
        self.healthy = True
        self.health_asked = self.info_asked = 0
        self.loads: list[str] = []  # versions it was told to load
        self.adapters: dict[str, str] = {}  # directories by name
        self.info: dict[str, Any] = {}  # of its arguments
        self.asked: list[Asked] = []
        self.http_requests = 0  # to /generate
        self.connections: set[Any] = set()  # that any came on
        self.aborted: list[str] = []  # request ids
        self.aborted_all = 0  # times
        self.ended: list[str] = []  # ids of requests that an abort has met: those that begin with its id
        self.steps = 0  # of its scheduler until aborted requests end; one lasts until it is asked for something
        self.paused = False
        self.running: dict[str, asyncio.Event] = {}
        self.refusal: Callable[[str], Awaitable[str]] = _taken  # why it does not take the weights of this name
        self.serve: Serve = self.whole
        self.events: Callable[[Asked], AsyncIterator[dict[str, Any]]] = self.one_event

    def answer(self, asked: Asked, tokens: list[int], finish: str | None = "length", **meta: Any) -> dict[str, Any]:
        """An answer with these tokens, or an event that brings them."""
        asked.cumulative += tokens
        reason = None if finish is None else {"type": finish, "length": len(asked.cumulative)}
        return {
            "output_ids": tokens,
            "meta_info": {
                "id": asked.rid,
                "finish_reason": reason,
                "completion_tokens": len(asked.cumulative),
                "weight_version": self.weight_version,
                "output_token_logprobs": [[-1.0, token, None] for token in tokens],
                **meta,
            },
        }

    async def die(self) -> None:
        """Close its port and its connections."""
        for site in list(self.runner.sites):
            await site.stop()
        for connection in list(self.connections):
            connection.close()

    async def whole(self, asked: Asked) -> dict[str, Any]:
        """All tokens that were asked for."""
        return self.answer(asked, asked.tokens())

    async def until_aborted(self, asked: Asked) -> dict[str, Any]:
        """No token, until the request is aborted."""
        await self.running.setdefault(asked.rid, asyncio.Event()).wait()
        return self.answer(asked, [], "abort")

    async def one_event(self, asked: Asked) -> AsyncIterator[dict[str, Any]]:
        """The answer of `serve` as the only event of a stream."""
        yield await self.serve(asked)

    # -- HTTP

    def application(self) -> web.Application:
        """Its routes."""
        application = web.Application(middlewares=[self._guard])
        for path, handler in (
            ("/generate", self._generate),
            ("/update_weights_from_disk", self._update),
            ("/load_lora_adapter", self._load_adapter),
            ("/unload_lora_adapter", self._unload_adapter),
            ("/update_weight_version", self._name_weights),
            ("/abort_request", self._abort),
            ("/destroy_weights_update_group", self._leave_group),
            ("/pause_generation", self._pause),
            ("/continue_generation", self._continue),
        ):
            application.router.add_post(path, handler)
        application.router.add_get("/health", self._health)
        application.router.add_get("/model_info", self._model_info)
        application.router.add_get("/v1/loads", self._loads)
        application.router.add_get("/server_info", self._server_info)
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.connections.add(request.transport)
        if self.key and request.path != "/health" and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.http_requests += 1
        batch = isinstance(body["input_ids"][0], list)
        prompts = body["input_ids"] if batch else [body["input_ids"]]
        samplings = body["sampling_params"] if batch else [body["sampling_params"]]
        rids = body["rid"] if batch else [body["rid"]]
        asked = [
            Asked(ids, sampling, rid, len(prompts), index, body["stream"])
            for index, (ids, sampling, rid) in enumerate(zip(prompts, samplings, rids, strict=True))
        ]
        for one in asked:
            one.extra_key = body.get("extra_key", "")
            one.adapter = body.get("lora_path", "")
            one.bootstrap = {name: value for name, value in body.items() if name.startswith("bootstrap_")}
        self.asked += asked
        if not body["stream"]:
            try:
                return web.json_response(await self.serve(asked[0]))
            except Fault as fault:
                return web.json_response({"error": {"message": fault.message}}, status=fault.status)
            except ConnectionError:
                return _broken(request)
        return await self._stream(request, asked, batch)

    async def _stream(self, request: web.Request, asked: list[Asked], batch: bool) -> web.StreamResponse:
        streams = [self.events(one) for one in asked]
        try:  # what cannot even begin is an HTTP fault of all
            first = [await anext(stream) for stream in streams]
        except Fault as fault:
            return web.json_response({"error": {"message": fault.message}}, status=fault.status)
        except ConnectionError:  # SGLang has begun its answer by then: a fault of its own breaks the connection
            return _broken(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        writing = asyncio.Lock()

        async def pour(index: int) -> None:
            event: dict[str, Any] | None = first[index]
            while event is not None:
                async with writing:
                    event = {**event, "index": index} if batch else event
                    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                event = await anext(streams[index], None)

        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(asked)):
                    group.create_task(pour(index))
        except* Fault as faults:
            fault = faults.exceptions[0]
            error = {"message": fault.message, "type": "invalid_request_error", "code": fault.status}
            await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _update(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        named = body.get("weight_version") or self.weight_version  # as it was, where a load gives no name
        if why := await self.refusal(named):
            return web.json_response({"success": False, "message": why}, status=400)
        self.loads.append(named)
        self.weight_version, self.model_path = named, body["model_path"]
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def _load_adapter(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        why = await self.refusal(body["lora_name"])
        if why := why or ("it is already loaded" if body["lora_name"] in self.adapters else ""):
            return _not_done(why)
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.json_response({"success": True, "error_message": "", "loaded_adapters": self.adapters})

    async def _unload_adapter(self, request: web.Request) -> web.StreamResponse:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return _not_done(f"no adapter {name}")
        return web.json_response({"success": True, "error_message": "", "loaded_adapters": self.adapters})

    async def _name_weights(self, request: web.Request) -> web.StreamResponse:
        self.weight_version = (await request.json())["new_version"]
        self.loads.append(self.weight_version)
        return web.json_response({"success": True, "message": "", "new_version": self.weight_version})

    async def _server_info(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response(self.info)

    async def _abort(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.aborted_all += bool(body.get("abort_all"))
        self.aborted += [] if body.get("abort_all") else [body["rid"]]
        met = [rid for rid in self.running if rid.startswith(body.get("rid", ""))]
        self.ended += [] if body.get("abort_all") else met
        self._end(met if not self.steps else [])
        return web.Response()

    async def _leave_group(self, request: web.Request) -> web.StreamResponse:
        self.steps -= 1
        self._end([*self.running] if self.aborted_all and self.steps == 0 else [])
        return web.json_response({"success": False, "message": "no such group"}, status=400)

    def _end(self, rids: list[str]) -> None:
        for rid in rids:
            self.running.pop(rid).set()

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        self.paused = True
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.StreamResponse:
        self.paused = False
        return web.json_response({"status": "ok"})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        self.health_asked += 1
        if self.paused:  # it tries to sample a token
            await asyncio.sleep(PAUSED_HEALTH_S)
            return web.Response(status=503)
        return web.Response(status=200 if self.healthy else 503)

    async def _model_info(self, request: web.Request) -> web.StreamResponse:
        self.info_asked += 1
        return web.json_response({"weight_version": self.weight_version, "model_path": self.model_path})

    async def _loads(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]})


async def _taken(_: str) -> str:
    return ""


def _not_done(why: str) -> web.StreamResponse:
    return web.json_response({"success": False, "error_message": why, "loaded_adapters": None}, status=400)


def _broken(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@asynccontextmanager
async def like_sglang(port: int = 0) -> AsyncIterator[LikeSGLang]:
    """Such a server, for the length of the block.

    Args:
        port: of one before it; 0 for any that nobody else takes when this one has gone.
    """
    server = LikeSGLang()
    runner = server.runner = web.AppRunner(server.application(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port or free_port())
        await site.start()
        server.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()
