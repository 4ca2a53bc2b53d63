"""One client for the embedded engine and for SGLang 0.5.17: only fields that both know."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import aiohttp
import msgspec
import numpy as np

from asyncrl.engine.answer import Chunk, Generation, Member, OnTokens, VersionSpan
from asyncrl.engine.batching import Batcher
from asyncrl.engine.errors import (
    EngineError,
    EngineRefused,
    EngineUnavailable,
    RequestFailed,
    fault_of,
    message_of,
)
from asyncrl.engine.server_load import EngineLoad, ServerLoads
from asyncrl.errors import UNREADABLE
from asyncrl.http_calls import read_body
from asyncrl.weights.transfer_manifest import Described, GroupPlace
from topics.wire import Int32Array

__all__ = [
    "Chunk",
    "EngineClient",
    "EngineRefused",
    "EngineUnavailable",
    "Generation",
    "SamplingParams",
    "VersionSpan",
]

_POLL_S = 0.005
_LAST_STEPS = 3  # steps of an overlapping scheduler until aborted requests have ended
_MOST = 16 << 20  # bytes of an answer that brings no tokens
_ABORT_AGAIN_S = 0.5  # a server that is not idle by then has got requests after the abort

T = TypeVar("T")


_AS_THEY_ARE = (  # options with equal names in the engine, sent if they differ from its defaults
    *("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
    *("min_new_tokens", "stop", "stop_token_ids", "ignore_eos"),
)


class SamplingParams(msgspec.Struct, frozen=True):
    """Sampling parameters. Log-probs are those of the distribution at `temperature`, before top-p, top-k and min-p."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 takes the likeliest token
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_p: float = 0.0
    frequency_penalty: float = 0.0  # of tokens that the engine itself has sampled for the request
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}  # added to logits, by token id
    min_new_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    seed: int | None = None
    ignore_eos: bool = False
    group: str = ""  # a router sends requests of one group to one engine
    routed: int | None = None  # the engine returns the experts of the tokens from this one on; None: of none
    top: int = 0  # likeliest tokens in each place whose log-probs are returned
    schema: str = ""  # JSON schema that the tokens must make, as JSON; "": any tokens
    priority: int = 0  # a request may replace one with a lower priority, which continues later
    adapter: str = ""  # name of an adapter that the server has loaded; "": none

    def body(self, stream_interval: int | None) -> dict[str, Any]:
        """`sampling_params` of a request: what differs from the engine's defaults."""
        body: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        for name, default in _DEFAULTS:
            if (value := getattr(self, name)) != default:
                body[name] = value
        if self.schema:
            body["json_schema"] = self.schema
        if self.seed is not None:
            body["sampling_seed"] = self.seed
        if stream_interval is not None:
            body["stream_interval"] = stream_interval
        return body


_DEFAULTS = [(name, getattr(SamplingParams(0), name)) for name in _AS_THEY_ARE]


class EngineClient:
    """Samples from one engine and controls it. Every wait has a deadline.

    Calls of `generate` made in one turn of the event loop travel as one HTTP request; each is answered when it ends. A
    fault of one of them is raised to that caller alone.

    Raises, from every method:
        EngineUnavailable: no connection, a broken one, or the deadline passed.
        RequestFailed: a server fault, or an invalid answer to this request.
        EngineOverloaded: the engine answered 429 or 503.
        EngineRefused: the engine answered 400; repeating the call will not help.
    """

    exact = True
    apart = False
    batcher: ClassVar[type[Batcher]] = Batcher  # sends its requests
    leaves = False  # a request is cancelled by closing its own connection, because it passes a router

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        connections: int = 512,
        generate_timeout_s: float = 1800.0,
        control_timeout_s: float = 60.0,
    ) -> None:
        self.address = address.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connections = connections
        self._generate_timeout_s = generate_timeout_s  # seconds without a token after which a generation has failed
        self._control_timeout_s = control_timeout_s  # seconds that any other call may take
        self._session: aiohttp.ClientSession | None = None
        abort = None if self.leaves else self.abort
        self._batcher = self.batcher(self._open, abort, self.address, generate_timeout_s)

    async def generate(
        self,
        input_ids: Sequence[int] | Int32Array,
        sampling: SamplingParams,
        *,
        extra_key: str | None = None,
        on_tokens: OnTokens | None = None,
        stream_interval: int = 16,
        alone: bool = False,
    ) -> Generation:
        """Continue a token sequence.

        Args:
            input_ids: [P] the tokens so far, at least one.
            sampling: how to sample.
            extra_key: requests with different keys never share cached prefixes.
            on_tokens: called with new tokens about every `stream_interval` of them, and at the end; the generation ends
                if it returns False.
            stream_interval: tokens between two calls of `on_tokens`.
            alone: in a separate HTTP request.

        Returns:
            The sampled tokens. An aborted generation has its tokens so far, none if it never started.
        """
        ids = input_ids.tolist() if isinstance(input_ids, np.ndarray) else list(input_ids)
        body = sampling.body(stream_interval if on_tokens else None)
        how = (sampling.group, sampling.routed, sampling.priority, sampling.top, sampling.adapter)
        member = Member(ids, body, extra_key, on_tokens, *how)
        return await self._batcher.generate(member, alone=alone)

    # -- control -------------------------------------------------------------------------------------------------

    async def abort(self, rid: str) -> None:
        """End one request."""
        await self._call("POST", "/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """End all requests; their answers carry the tokens so far."""
        await self._call("POST", "/abort_request", {"abort_all": True})

    async def wait_idle(self, deadline_s: float) -> None:
        """Return when nothing runs and nothing waits.

        Raises:
            EngineUnavailable: still busy after `deadline_s` seconds.
        """
        end = time.monotonic() + deadline_s
        while True:
            left = max(end - time.monotonic(), 0.0)
            # The embedded engine answers when it is idle; SGLang ignores the parameter and answers at once.
            busy = (await self._load(f"?wait_idle={left:.3f}", extra_s=left)).requests
            if not busy:
                return
            if time.monotonic() >= end:
                raise EngineUnavailable(self.address, f"still {busy} requests after {deadline_s:g} s")
            await asyncio.sleep(min(_POLL_S, max(end - time.monotonic(), 0.0)))

    async def empty(self) -> None:
        """Abort all requests until none is left, also those sent by clients that have not seen an update yet.

        It has no deadline: new requests may arrive as long as clients send them.
        """
        while True:
            await self.abort_all()
            # SGLang reports its load every 15 steps or after a prompt: until then running requests may be missing.
            for _ in range(_LAST_STEPS):
                await self.pass_scheduler()
            with contextlib.suppress(EngineUnavailable):
                return await self.wait_idle(_ABORT_AGAIN_S)

    async def pass_scheduler(self) -> None:
        """Return when the scheduler has read all calls before this one, which it refuses; it reads between steps."""
        with contextlib.suppress(EngineRefused, RequestFailed):  # the latter: of a server that has no such call
            await self.leave_group("none")

    async def halt(self) -> None:
        """Abort all requests, and freeze the scheduler when it has obeyed; their answers may come later.

        SGLang's front process needs some 0.1 s of CPU time to hand out 512 answers, which can overlap the load of
        weights.
        """
        await self.abort_all()
        await self.pass_scheduler()
        # This pause ends the step that it is in; one in place would keep its tokens back until the weights are others.
        await self.pause("retract")
        await self.abort_all()  # what came in between is queued

    async def pause(self, mode: Literal["abort", "in_place", "retract"]) -> None:
        """Stop sampling: end all requests, freeze them, or send them back to the queue."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        """Sample again."""
        # SGLang would give cached memory back to the GPU, and take it again for the prompts that come now.
        await self._call("POST", "/continue_generation", {"torch_empty_cache": False})

    async def read_weights_ahead(self, path: Path) -> None:
        """Let the embedded engine read weights while it samples: an update from that directory only swaps them."""
        await self._call("POST", "/read_weights_ahead", {"model_path": str(path)})

    async def update_weights(self, path: str | Path, version: str, flush_cache: bool) -> None:
        """Load weights from a directory that the engine can read, and call them `version`.

        SGLang ends at `flush_cache` while requests are frozen or queued: send false there.
        """
        # Left out, SGLang loads as it did at its start, which may have read nothing.
        body = {"model_path": str(path), "weight_version": version, "flush_cache": flush_cache, "load_format": "auto"}
        await self._call("POST", "/update_weights_from_disk", body)

    async def load_adapter(self, name: str, path: Path) -> list[str]:
        """Load an adapter under a name that requests may give; returns the names of all that are loaded."""
        raw = await self._call("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        return list(self._decode(raw, dict[str, Any]).get("loaded_adapters") or ())

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter; SGLang waits for the requests that name it."""
        await self._call("POST", "/unload_lora_adapter", {"lora_name": name})

    async def name_weights(self, version: str) -> None:
        """Call what the server has `version`."""
        await self._call("POST", "/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def release_memory(self) -> None:
        """Give the memory of weights and caches back; nothing may run or wait."""
        await self._call("POST", "/release_memory_occupation", {})

    async def resume_memory(self) -> None:
        """Take the memory again; the weights in it are no weights until the next update."""
        await self._call("POST", "/resume_memory_occupation", {})

    async def update_from_memory(self, tensors: bytes, version: str | None, ranks: int = 1) -> None:
        """Load weights of another process's memory (`asyncrl.weights.shared`) into each rank; `version` as below."""
        text = base64.b64encode(tensors).decode()
        body = {"serialized_named_tensors": [text] * ranks, "weight_version": version, "flush_cache": False}
        await self._call("POST", "/update_weights_from_tensor", body)

    async def join_group(self, place: GroupPlace) -> None:
        """Become the other ranks of a group whose rank 0 sends weights."""
        body = {
            "master_address": place.address,
            "master_port": place.port,
            "rank_offset": 1,
            "world_size": place.size,
            "group_name": place.name,
            "backend": place.backend,
        }
        await self._call("POST", "/init_weights_update_group", body)

    async def leave_group(self, name: str) -> None:
        """Leave such a group."""
        await self._call("POST", "/destroy_weights_update_group", {"group_name": name})

    async def update_from_group(self, name: str, tensors: Sequence[Described], version: str | None) -> None:
        """Receive weights over a group, and call them `version` if they are the last ones of it."""
        body: dict[str, Any] = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [tensor.shape for tensor in tensors],
            "group_name": name,
            "weight_version": version,
            "flush_cache": False,
        }
        await self._call("POST", "/update_weights_from_distributed", body)

    async def health(self) -> bool:
        """Return whether the engine answers and is well."""
        try:
            await self._call("GET", "/health")
        except EngineError:
            return False
        return True

    async def load(self) -> EngineLoad:
        """Return the load at this moment."""
        return await self._load("")

    async def _load(self, query: str, extra_s: float = 0.0) -> EngineLoad:
        raw = await self._call("GET", f"/v1/loads{query}", extra_s=extra_s)
        return self._decode(raw, ServerLoads).sum

    async def model_info(self) -> dict[str, Any]:
        """Return the served model; `weight_version` among its fields."""
        return self._decode(await self._call("GET", "/model_info"), dict[str, Any])

    async def server_info(self) -> dict[str, Any]:
        """Return the arguments of the server; `context_length` among them."""
        return self._decode(await self._call("GET", "/server_info"), dict[str, Any])

    async def label(self) -> str:
        """Return the name of the weights."""
        return str((await self.model_info()).get("weight_version"))

    def announced(self, key: str) -> None:
        """Nothing follows: the server labels its tokens itself."""

    async def close(self) -> None:
        """Cancel running requests and close the connections."""
        await self._batcher.close()
        if self._session is not None:
            await self._session.close()

    # -- HTTP ----------------------------------------------------------------------------------------------------

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None, extra_s: float = 0.0) -> bytes:
        raw = None if body is None else msgspec.json.encode(body)
        async with self._open(method, path, raw, self._control_timeout_s + extra_s) as response:
            return await read_body(response, _MOST)

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response with status 200 or 499; every other outcome, also while it is read, is one of our errors.

        A redirection is not followed: requests go to the engine that was named, and to no other server.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._connections)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=self._headers, auto_decompress=False, read_bufsize=2**20
            )
        if timeout_s is None:  # a generation has its own deadline; this one is for a server that sends nothing at all
            timeout = aiohttp.ClientTimeout(sock_connect=10.0, sock_read=self._generate_timeout_s)
        else:
            timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0)
        try:
            request = self._session.request(
                method, self.address + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            )
            async with request as response:
                if response.status not in (200, 499):
                    place = response.headers.get("Location") if response.status // 100 == 3 else ""
                    words = f"it refers to {place}".encode() if place else await read_body(response, _MOST)
                    raise self._fault(response.status, words)
                yield response
        except TimeoutError as fault:
            waited_s = timeout_s or self._generate_timeout_s
            raise EngineUnavailable(self.address, f"{method} {path}: no answer in {waited_s:g} s") from fault
        except UNREADABLE as fault:
            raise RequestFailed(f"{method} {path}: unreadable answer: {fault}") from fault
        except (aiohttp.ClientError, OSError) as fault:
            raise EngineUnavailable(self.address, f"{method} {path}: {type(fault).__name__}: {fault}") from fault

    def _fault(self, status: int, raw: bytes) -> EngineError:
        """The error that an answer means."""
        return fault_of(status, message_of(raw))

    def _decode(self, raw: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(raw, type=kind)
        except UNREADABLE as fault:
            raise RequestFailed(f"unreadable answer: {fault}") from fault
