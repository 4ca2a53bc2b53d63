"""An HTTP address at which a program that knows nothing of rollouts samples from the policy.

A prompt continues the sampled tokens of the conversation before it, as in the gateway. A call is journalled by its
content, so a program need not ask in a fixed order: an equal call of a resumed trajectory gets the recorded answer.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from types import TracebackType
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import xxhash
from aiohttp import web

from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.errors import EnvironmentFault
from asyncrl.live.apis.models import MODELS_PATH, models_body
from asyncrl.live.apis.registry import APIS
from asyncrl.live.apis.schema import TOO_LONG, Api, Call, LiveError, Opening, Piece, Request, assistant_message
from asyncrl.live.conversation import Conversations, Prompt, history_key
from asyncrl.live.difference import History, Message, TurnBoundary
from asyncrl.live.forced_prefix import begin_reply
from asyncrl.live.reply import Bounds, completed_prompt, ending_of, event_of, refusing_prompts
from asyncrl.live.reply_parser import ReplyParts
from asyncrl.live.sampling import sampling_of
from asyncrl.live.tools import Wording
from asyncrl.live.turn_boundary import AUTO, open_boundary
from asyncrl.ports import LOOPBACK
from asyncrl.rollout.journal import outside
from asyncrl.rollout.mcp_endpoint import MCP_PATH, answer_of
from asyncrl.rollout.snapshots import EndedCall
from asyncrl.rollout.tool_calls import ToolCalls
from topics.trajectories import Answer
from topics.wire import Int32Array

Sample: TypeAlias = Callable[[Int32Array, int, Sequence[str]], Awaitable[tuple[str, Answer]]]
"""Samples a continuation of [P] tokens: at most so many tokens, up to these stops. Returns call path and answer."""

_BODY_BYTES = 2**26
_KEEPALIVE_S = 10.0
_HISTORY_TOKENS = 2**24  # of one trajectory
_MODEL = "policy"
_EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


class _Language(NamedTuple):
    """A model's way of writing conversations."""

    wording: Wording
    boundary: TurnBoundary


class Reply(NamedTuple):
    """A reply to a conversation."""

    text: str  # without calls
    calls: list[Call]
    message: Message  # the reply as the next message of the conversation


class _Read(NamedTuple):
    """An answer as its client reads it."""

    opening: Opening
    parts: ReplyParts
    pieces: list[Piece]


@lru_cache(maxsize=4)
def _language_of(tokenizer: TaskTokenizer) -> _Language:
    return _Language(Wording.of(tokenizer), open_boundary(tokenizer, AUTO))


class Endpoint:
    """A server on loopback for one trajectory, with the APIs of the gateway. `async with` starts and ends it."""

    base_url = ""  # such as `http://127.0.0.1:PORT/v1`, as OpenAI's SDK takes it
    api_key = ""  # for this address alone
    mcp_url = ""  # of an MCP server with the tools of the trajectory, with the same key; "": it has no tools

    def __init__(
        self,
        tokenizer: TaskTokenizer,
        sample: Sample,
        *,
        max_new_tokens: int,
        restore: Callable[[str, Int32Array], Answer],
    ) -> None:
        """
        Args:
            restore: takes up a call that ended before a snapshot, by its path and prompt; returns its answer.

        Raises:
            TokenizerError: the model cannot hold conversations.
        """
        self._language, self._tokenizer = _language_of(tokenizer), tokenizer
        self._sample, self._most = sample, max_new_tokens
        self._known = Conversations(self._language.boundary, most_tokens=_HISTORY_TOKENS)
        self._bounds = Bounds(partial(begin_reply, wording=self._language.wording, grammars=False))
        self._fault: Exception | None = None
        self._listening: socket.socket | None = None
        self._tools: ToolCalls | None = None
        self._open, self._opened_at, self._waited_s = 0, 0.0, 0.0
        self._restore, self._ended = restore, list[EndedCall]()  # calls since the newest snapshot
        self.snapshot: Callable[[list[EndedCall]], Awaitable[bool]] | None = None
        """Stores a snapshot with these calls, before a call is sampled; returns whether it did."""

    @property
    def waited_s(self) -> float:
        """Seconds in which at least one call waited for its answer."""
        return self._waited_s + (time.monotonic() - self._opened_at if self._open else 0.0)

    async def reply(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Reply:
        """Return the reply to a conversation, without a server.

        Args:
            tools: schemas of the tools that it may call.

        Raises:
            LiveError: the template refuses the messages, or they fill the context of the model.
        """
        request = Request(_MODEL, list(messages), tools=list(tools))
        prompt = self._prompt(request)
        with outside():
            path, answer = await self._sampled(request, prompt)
        parts = self._read(request, prompt, path, answer).parts
        return Reply(parts.text, parts.calls, assistant_message(parts.text, parts.calls))

    def listen(self, listening: socket.socket | None, tools: ToolCalls | None = None) -> Endpoint:
        """Serve at a socket that listens already, such as one of a sandbox; None: at a free port of loopback.

        Args:
            tools: that programs may call by MCP at `mcp_url`.
        """
        self._listening, self._tools = listening, tools
        return self

    async def __aenter__(self) -> Endpoint:
        app = web.Application(client_max_size=_BODY_BYTES)
        app.router.add_get(MODELS_PATH, self._models)
        app.router.add_post(MCP_PATH, self._mcp)
        for api in APIS.values():
            app.router.add_post(api.path, partial(self._serve, api))
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0, access_log=None)
        with outside():  # handlers are no branches of the rollout function
            await self._runner.setup()
            listening = self._listening or socket.create_server((LOOPBACK, 0))
            await web.SockSite(self._runner, listening).start()
        host = f"http://{LOOPBACK}:{listening.getsockname()[1]}"
        self.base_url, self.mcp_url = f"{host}/v1", f"{host}{MCP_PATH}" if self._tools is not None else ""
        self.api_key = secrets.token_hex(16)
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """
        Raises:
            Exception: of a call that could not be sampled; the trajectory fails as if `generate` had raised it.
        """
        with outside():
            await self._runner.cleanup()
        if self._fault is not None and not isinstance(error, asyncio.CancelledError):
            raise self._fault from error

    async def _models(self, _http: web.Request) -> web.StreamResponse:
        return web.json_response(models_body([_MODEL]))

    async def _serve(self, api: Api, http: web.Request) -> web.StreamResponse:
        try:
            self._check(http)
            request = api.parse(await http.read())
            _check_supported(request)
            prompt = self._prompt(request)
        except LiveError as error:
            status, body = api.error(error, secrets.token_hex(12))
            return web.json_response(body, status=status)
        with outside():
            task = asyncio.ensure_future(self._sampled(request, prompt))
        try:
            return await self._reply(api, http, request, prompt, task)
        finally:
            task.cancel()  # its client is gone
            await asyncio.wait({task})

    async def _mcp(self, http: web.Request) -> web.StreamResponse:
        try:
            self._check(http)
            message = msgspec.json.decode(await http.read())
        except LiveError as error:
            return web.Response(status=401, text=str(error))
        except msgspec.DecodeError as error:
            return web.Response(status=400, text=str(error))
        if self._tools is None:
            return web.Response(status=404, text="the trajectory has no tools")
        try:
            answer = await answer_of(self._tools, message)
        except EnvironmentFault as error:
            self._fault = self._fault or error
            return web.Response(status=503, text=str(error))
        return web.Response(status=202) if answer is None else web.json_response(answer)

    def _check(self, http: web.Request) -> None:
        _, _, bearer = http.headers.get("Authorization", "").partition(" ")
        given = http.headers.get("x-api-key") or bearer.strip()
        if not secrets.compare_digest(given.encode(), self.api_key.encode()):
            raise LiveError("key", "the API key is not that of this endpoint; take endpoint.api_key")
        if self._fault is not None:
            raise LiveError("internal", f"an earlier call failed: {self._fault}")

    def _prompt(self, request: Request) -> Prompt:
        known = self._known
        with refusing_prompts(self._bounds.most):
            begun = self._bounds.begin(request)
            if request.raw is not None:
                prompt = known.raw(request.raw, "", special=request.special)()
            else:
                prompt = known.draft(request.messages, "", request.tools, request.variables)()
        return completed_prompt(request, prompt, begun, self._bounds)

    async def _sampled(self, request: Request, prompt: Prompt) -> tuple[str, Answer]:
        """
        Raises:
            LiveError: the prompt fills the context of the model.
        """
        wording = self._language.wording
        form = wording.form if request.tools else None
        sampling = sampling_of(request, form, self._tokenizer.stop_ids, most=self._most, choice=0)
        with self._waiting():
            if self.snapshot is not None and self._open == 1 and await self.snapshot(self._ended):
                self._ended = []
            path, answer = await self._sample(prompt.ids, min(sampling.max_new_tokens, self._most), sampling.stop)
        if not len(answer.tokens) and answer.finish == "length":
            words = f"prompt is too long: its {len(prompt.ids)} tokens fill the context of the model"
            raise LiveError("invalid", f"{words}: send fewer messages", field="messages", code=TOO_LONG)
        return path, answer

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._opened_at = self._opened_at if self._open else time.monotonic()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            self._waited_s += 0.0 if self._open else time.monotonic() - self._opened_at

    async def _reply(
        self, api: Api, http: web.Request, request: Request, prompt: Prompt, task: asyncio.Task[tuple[str, Answer]]
    ) -> web.StreamResponse:
        streamed = await self._wait(http, task) if request.stream else None
        try:
            path, answer = await task
        except Exception as error:  # noqa: BLE001 - any fault of a call ends the trajectory, where the function leaves
            fault = error if isinstance(error, LiveError) else None
            if fault is None:
                self._fault = self._fault or error
                fault = LiveError("internal", f"the policy cannot be sampled: {error}")
            if streamed is not None:
                await streamed.write(api.events(_opening("", request, prompt), request).fail(fault))
                return streamed
            status, body = api.error(fault, secrets.token_hex(12))
            return web.json_response(body, status=status)
        opening, parts, pieces = self._read(request, prompt, path, answer)
        ending = ending_of(request, answer, parts, self._tokenizer)
        if not request.stream:
            return web.json_response(api.whole(opening, request, [ending]))
        streamed = streamed or await _begin_events(http)
        events = api.events(opening, request)
        content = [events.begin(), *(event_of(events, piece) for piece in pieces), events.end(ending)]
        await streamed.write(b"".join(content) + events.done([ending]))
        await streamed.write_eof()
        return streamed

    def _read(self, request: Request, prompt: Prompt, path: str, answer: Answer) -> _Read:
        """Return a whole answer as its client reads it; later prompts of the conversation begin with its tokens."""
        opening = _opening(path, request, prompt)
        parts = ReplyParts(request, self._language.wording, opening.turn, begun=prompt.begun)
        pieces = [*parts.add(answer.tokens), *parts.end()]
        key = history_key(assistant_message(parts.text, parts.calls), prompt.key)
        call = EndedCall(path, prompt.ids, key, prompt.key, prompt.tools)
        self._remember(call, answer)
        if self.snapshot is not None:
            self._ended.append(call)
        return _Read(opening, parts, pieces)

    def restore(self, call: EndedCall) -> None:
        """Take up a call that ended before the snapshot from which the trajectory continues."""
        self._remember(call, self._restore(call.path, call.ids))

    async def _wait(self, http: web.Request, task: asyncio.Task[tuple[str, Answer]]) -> web.StreamResponse | None:
        """Keep a client waiting that reads events until its answer is whole; None if it need not wait for long."""
        response = None
        while not task.done():
            await asyncio.wait({task}, timeout=_KEEPALIVE_S)
            if not task.done():
                response = response or await _begin_events(http)
                await response.write(b": the answer is being sampled\n\n")  # a comment, which clients pass over
        return response

    def _remember(self, call: EndedCall, answer: Answer) -> None:
        """Let later prompts of the conversation begin with the tokens of this reply."""
        ids, turn = np.concatenate([call.ids, answer.tokens]), _turn_of(call.path, call.ids)
        self._known.put(call.key, History(turn, ids, len(call.ids), tools=call.tools, before=call.before))


async def _begin_events(http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers=_EVENTS)
    await response.prepare(http)
    return response


def _check_supported(request: Request) -> None:
    """Refuse what would sample otherwise than the run does, or that a trajectory cannot record."""
    asked = {"n": request.choices > 1, "stop_token_ids": request.stop_ids, "previous_response_id": request.previous}
    for field in [field for field, is_asked in asked.items() if is_asked]:
        raise LiveError("invalid", f"{field} is not supported by the endpoint of a rollout: leave it out", field=field)


def _opening(path: str, request: Request, prompt: Prompt) -> Opening:
    """The facts of a reply before its tokens; an equal call of a resumed trajectory has the same id."""
    turn = _turn_of(path, prompt.ids)
    ids = prompt.ids.tolist() if request.token_ids else None
    return Opening(turn, request.model or _MODEL, int(time.time()), len(prompt.ids), ids)


def _turn_of(path: str, ids: Int32Array) -> str:
    """Return the name of a reply: equal for an equal call of a resumed trajectory."""
    return xxhash.xxh3_128_hexdigest(path.encode() + ids.tobytes())[:24]
