"""SGLang's HTTP API over the embedded engine."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, get_args

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest

from asyncrl.engine.embedded.answers import Call
from asyncrl.engine.embedded.memory import TAGS
from asyncrl.engine.embedded.receiving import Receiver
from asyncrl.engine.embedded.scheduler import Engine, PauseMode
from asyncrl.engine.embedded.schema import (
    AbortBody,
    FromGroupBody,
    FromMemoryBody,
    GroupBody,
    LeaveBody,
    MemoryBody,
    PathBody,
    PauseBody,
    UpdateBody,
    absent,
    decode,
    decode_generate,
)
from asyncrl.engine.errors import EngineError, EngineRefused

Handler = Callable[[BaseRequest], Awaitable[web.StreamResponse]]

_MAX_BODY_BYTES = 256 * 2**20
_BODY_S = 60.0  # for a body to arrive
_LONGEST_WAIT_S = 3600.0
_OPEN_PATHS = ("/health", "/metrics")


class _Connection(RequestHandler):
    """A connection that counts invalid HTTP and failed handlers."""

    refused: Counter[int]

    def handle_error(self, request: BaseRequest, status: int = 500, *args: Any, **named: Any) -> web.StreamResponse:
        """Answer a fault."""
        self.refused[status] += 1
        return super().handle_error(request, status, *args, **named)


class _Server(web.Server):
    """Makes connections."""

    refused: Counter[int]

    def __call__(self) -> RequestHandler:
        """A connection for the event loop."""
        connection = _Connection(self, loop=self._loop, **self._kwargs)
        connection.refused = self.refused
        return connection


class EngineServer:
    """Routes requests to one engine. No framework in front of `/generate`: a dictionary look-up."""

    def __init__(self, engine: Engine, *, incremental: bool = False, api_key: str | None = None) -> None:
        self.engine = engine
        self.incremental = incremental
        self.started_s = time.time()
        self._receiver = Receiver(engine)
        self._key = None if api_key is None else f"Bearer {api_key}".encode()
        self._routes: dict[str, tuple[str, Handler]] = {
            "/generate": ("POST", self.generate),
            "/health": ("GET", self.health),
            "/health_generate": ("GET", self.health),
            "/model_info": ("GET", self.model_info),
            "/get_model_info": ("GET", self.model_info),
            "/server_info": ("GET", self.server_info),
            "/get_server_info": ("GET", self.server_info),
            "/v1/loads": ("GET", self.loads),
            "/metrics": ("GET", self.metrics),
            "/pause_generation": ("POST", self.pause),
            "/continue_generation": ("POST", self.resume),
            "/read_weights_ahead": ("POST", self.read_ahead),  # SGLang has no such call
            "/update_weights_from_disk": ("POST", self.update_weights),
            "/update_weights_from_tensor": ("POST", self.update_from_memory),
            "/update_weights_from_distributed": ("POST", self.update_from_group),
            "/init_weights_update_group": ("POST", self.join_group),
            "/destroy_weights_update_group": ("POST", self.leave_group),
            "/release_memory_occupation": ("POST", self.release_memory),
            "/resume_memory_occupation": ("POST", self.resume_memory),
            "/abort_request": ("POST", self.abort),
            "/flush_cache": ("GET POST", self.flush),
        }

    def protocol(self) -> web.Server:
        """The protocol factory for `loop.create_server`. A client that leaves cancels its handler."""
        quiet = logging.getLogger("asyncrl.engine.http")
        quiet.propagate = False  # probes of routers (an HTTP/2 preface, say) are answered, not reported
        quiet.addHandler(logging.NullHandler())
        server = _Server(
            self.dispatch, handler_cancellation=True, access_log=None, logger=quiet, keepalive_timeout=75.0
        )
        server.refused = self.engine.counters.refused
        return server

    async def dispatch(self, request: BaseRequest) -> web.StreamResponse:
        """Answer one HTTP request; refusals are counted."""
        answer = await self._answer(request)
        if answer.status >= 400:
            self.engine.counters.refused[answer.status] += 1
        return answer

    async def _answer(self, request: BaseRequest) -> web.StreamResponse:
        path = request.path
        route = self._routes.get(path)
        if route is None:
            return _error(404, f"no such endpoint: {path[:200]}")
        if request.method not in route[0]:
            return _error(405, f"{path} takes {route[0]}, not {request.method}")
        if self._key is not None and not path.startswith(_OPEN_PATHS):
            given = request.headers.get("Authorization", "").encode(errors="replace")
            if not hmac.compare_digest(given, self._key):
                return _error(401, "Unauthorized")
        try:
            return await route[1](request)
        except EngineRefused as fault:
            return _error(400, str(fault))

    # -- generation ----------------------------------------------------------------------------------------------

    async def generate(self, request: BaseRequest) -> web.StreamResponse:
        """POST /generate: one prompt or a batch, whole or streamed."""
        if found := absent(self.engine.weight_version, request.headers):
            answer = _error(found.status, found.message)
            answer.headers["Retry-After"] = "1"
            return answer
        body, asked, batch = decode_generate(await _read(request))
        call = Call(self.engine, body, asked, incremental=self.incremental)
        call.start(batch=batch)
        try:
            if not body.stream:
                return _raw(await call.whole())
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            async for chunk in call.events():
                await response.write(chunk)
            await response.write_eof()
            return response
        finally:
            call.cancel()

    # -- information ---------------------------------------------------------------------------------------------

    async def health(self, request: BaseRequest) -> web.Response:
        """GET /health: the loop that samples answers it between two layers, so an answer is the proof."""
        return web.Response()

    async def model_info(self, request: BaseRequest) -> web.Response:
        """GET /model_info."""
        engine = self.engine
        return _json(
            {
                "model_path": str(engine.model_path),
                "tokenizer_path": str(engine.model_path),
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": engine.weight_version,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": engine.config.architecture.removesuffix("ForCausalLM").lower(),
                "architectures": [engine.config.architecture],
            }
        )

    async def server_info(self, request: BaseRequest) -> web.Response:
        """GET /server_info."""
        engine = self.engine
        return _json(
            {
                "engine": "asyncrl-embedded",
                "version": "asyncrl-embedded",
                "pid": os.getpid(),
                "model_path": str(engine.model_path),
                "served_model_name": str(engine.model_path),
                "tokenizer_path": str(engine.model_path),
                "device": "cpu",
                "dtype": str(engine.dtype).removeprefix("torch."),
                "tp_size": 1,
                "dp_size": 1,
                "load_balance_method": "round_robin",
                "disaggregation_mode": "null",
                "weight_version": engine.weight_version,
                "context_length": engine.context_length,
                "max_running_requests": engine.max_running,
                "max_total_num_tokens": engine.budget_tokens,
                "vocab_size": engine.config.vocab_size,
                "incremental_streaming_output": self.incremental,
                "startup_time": self.started_s,
                "internal_states": [{"last_gen_throughput": engine.counters.throughput()}],
            }
        )

    async def loads(self, request: BaseRequest) -> web.Response:
        """GET /v1/loads; `?wait_idle=SECONDS` answers as soon as nothing runs or waits, or when the time is up.

        With `&priority=1` requests without a priority do not count.
        """
        seconds = _seconds(request, "wait_idle")
        if seconds:
            await self._wait_idle(seconds, above=0 if request.query.get("priority") == "1" else None)
        return _json(
            {"timestamp": time.time(), "version": "asyncrl-embedded", "loads": [{"dp_rank": 0, **self._load()}]}
        )

    async def metrics(self, request: BaseRequest) -> web.Response:
        """GET /metrics."""
        load = self._load()
        names = ("num_used_tokens", "max_total_num_tokens", "token_usage", "utilization")
        gauges = {name: load[name] for name in names}
        gauges["num_running_reqs"] = load["num_running_reqs"]
        gauges["num_queue_reqs"] = load["num_waiting_reqs"]
        gauges["num_paused_reqs"] = load["num_running_reqs"] if self.engine.paused else 0
        text = self.engine.counters.prometheus(str(self.engine.model_path), gauges)
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    def _load(self) -> dict[str, float]:
        engine = self.engine
        used = sum(len(request.prompt) + len(request.tokens) for request in engine.running)
        total = engine.budget_tokens
        counters = engine.counters
        return {
            "num_running_reqs": len(engine.running),
            "num_waiting_reqs": len(engine.requests) - len(engine.running),
            "num_used_tokens": used,
            "max_total_num_tokens": total,
            "max_running_requests": engine.max_running,
            "token_usage": used / total,
            "gen_throughput": counters.throughput(),
            "cache_hit_rate": counters.cached_tokens / max(counters.prompt_tokens, 1),
            "utilization": len(engine.running) / engine.max_running,
        }

    async def _wait_idle(self, seconds: float, *, above: int | None = None) -> None:
        requests = self.engine.requests
        try:
            async with asyncio.timeout(seconds):
                while any(above is None or one.priority > above for one in requests.values()):
                    await self.engine.changed.wait()
        except TimeoutError:
            pass  # the answer lists what still runs

    # -- control -------------------------------------------------------------------------------------------------

    async def pause(self, request: BaseRequest) -> web.Response:
        """POST /pause_generation."""
        mode = decode(await _read(request), PauseBody).mode
        modes: tuple[PauseMode, ...] = get_args(PauseMode)
        for known in modes:
            if mode == known:
                self.engine.pause(known)
                await self.engine.settled()
                return _json({"message": "Generation paused successfully.", "status": "ok"})
        raise EngineRefused(f"pause mode {mode!r}; expected one of {', '.join(modes)}")

    async def resume(self, request: BaseRequest) -> web.Response:
        """POST /continue_generation; no fault when nothing is paused."""
        self.engine.resume()
        await self.engine.settled()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def read_ahead(self, request: BaseRequest) -> web.Response:
        """POST /read_weights_ahead: of a directory that an update will name."""
        await self.engine.ahead.read(Path(decode(await _read(request), PathBody).model_path))
        return _json(None)

    async def update_weights(self, request: BaseRequest) -> web.Response:
        """POST /update_weights_from_disk."""
        body = decode(await _read(request), UpdateBody)
        self._receiver.forget()
        if body.abort_all_requests:
            self.engine.abort_all()
        try:
            await self.engine.update_weights(Path(body.model_path), body.weight_version, flush=body.flush_cache)
        except (EngineError, OSError, ValueError) as fault:  # the latter two: a path that can be none
            return _json({"success": False, "message": str(fault), "num_paused_requests": 0}, status=400)
        return _json({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def update_from_memory(self, request: BaseRequest) -> web.Response:
        """POST /update_weights_from_tensor."""
        return await _succeeded(self._receiver.from_memory(decode(await _read(request), FromMemoryBody)))

    async def update_from_group(self, request: BaseRequest) -> web.Response:
        """POST /update_weights_from_distributed."""
        return await _succeeded(self._receiver.from_group(decode(await _read(request), FromGroupBody)))

    async def join_group(self, request: BaseRequest) -> web.Response:
        """POST /init_weights_update_group."""
        return await _succeeded(self._receiver.join(decode(await _read(request), GroupBody)))

    async def leave_group(self, request: BaseRequest) -> web.Response:
        """POST /destroy_weights_update_group."""
        return await _succeeded(self._receiver.leave(decode(await _read(request), LeaveBody).group_name))

    async def release_memory(self, request: BaseRequest) -> web.Response:
        """POST /release_memory_occupation: of an idle engine alone."""
        tags = decode(await _read(request), MemoryBody).tags
        if not self.engine.idle:
            raise EngineRefused(f"{len(self.engine.requests)} requests run or wait; abort them first")
        self.engine.memory.release(TAGS if tags is None else tags)
        return _json(None)

    async def resume_memory(self, request: BaseRequest) -> web.Response:
        """POST /resume_memory_occupation; the caller loads weights afterwards."""
        tags = decode(await _read(request), MemoryBody).tags
        self.engine.memory.resume(TAGS if tags is None else tags)
        self.engine.changed.fire()
        return _json(None)

    async def abort(self, request: BaseRequest) -> web.Response:
        """POST /abort_request; also 200 for an unknown id."""
        body = decode(await _read(request), AbortBody)
        if body.abort_all:
            self.engine.abort_all()
        else:
            self.engine.abort(body.rid)
        await self.engine.settled()
        return web.Response()

    async def flush(self, request: BaseRequest) -> web.Response:
        """GET or POST /flush_cache; `?timeout=SECONDS` waits for an idle engine."""
        seconds = _seconds(request, "timeout")
        if seconds:
            await self._wait_idle(seconds)
        if self.engine.flush_cache():
            return web.Response(text="Cache flushed.\n")
        return web.Response(status=400, text="Cache not flushed: requests are running or waiting.\n")


async def _read(request: BaseRequest) -> bytes:
    if (request.content_length or 0) > _MAX_BODY_BYTES:
        raise EngineRefused(f"the body has {request.content_length} bytes; at most {_MAX_BODY_BYTES} are read")
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.content.iter_any():  # a chunked body does not give its length
                size += len(part)
                if size > _MAX_BODY_BYTES:
                    raise EngineRefused(f"the body has more than {_MAX_BODY_BYTES} bytes")
                parts.append(part)
    except TimeoutError:
        raise EngineRefused(f"{size} bytes of the body came within {_BODY_S:.0f} s, and not its end") from None
    except (web.RequestPayloadError, aiohttp.ClientPayloadError, HttpProcessingError) as fault:
        raise EngineRefused(f"the body cannot be read: {fault}") from fault
    return b"".join(parts)


def _seconds(request: BaseRequest, name: str) -> float:
    raw = request.query.get(name, "0")
    try:
        seconds = float(raw)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= _LONGEST_WAIT_S:
        raise EngineRefused(f"{name}={raw[:80]!r}: expected a number of seconds, at most {_LONGEST_WAIT_S:.0f}")
    return seconds


async def _succeeded(work: Awaitable[None]) -> web.Response:
    """Answer whether something was done, as SGLang does."""
    try:
        await work
    except EngineError as fault:
        return _json({"success": False, "message": str(fault)}, status=400)
    return _json({"success": True, "message": "Success"})


def _raw(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, headers={"Content-Type": "application/json"})


def _json(value: Any, status: int = 200) -> web.Response:
    return _raw(msgspec.json.encode(value), status)


def _error(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message}}, status)
