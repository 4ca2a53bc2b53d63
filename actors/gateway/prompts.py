"""Requests as they come over HTTP, and the tokens of their prompts: few large bodies, and few long texts, at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from aiohttp import web

from actors.gateway.clients import lost_of
from actors.gateway.fair_queue import FairQueue
from actors.gateway.request_body import read_body, room_of
from actors.gateway.turn_store import TurnStore
from asyncrl.config.live_settings import GatewaySettings
from asyncrl.live.apis.models import check_model
from asyncrl.live.apis.schema import LiveError, Request
from asyncrl.live.conversation import Draft, Prompt
from asyncrl.live.reply import Bounds, completed_prompt, refusing_prompts
from asyncrl.live.tenant_keys import owner_of, user_of
from asyncrl.live.turn_log import TurnLog

_LONG = 16_384  # bytes of a body whose prompt is encoded in a thread, so that it does not block streams
_LARGE, _LARGE_AT_ONCE = 2**18, 16  # bytes of a body that takes room which all requests share

Parse = Callable[[bytes], Request]
Reads = Callable[[web.Request, int], Awaitable[bytes]]


class Taken(NamedTuple):
    """A request that was read."""

    request: Request
    user: str  # by `asyncrl.live.tenant_keys`
    owner: str  # whose histories it may continue
    prompt: Prompt


class Prompts:
    """Reads requests, and writes and encodes their prompts."""

    def __init__(
        self,
        settings: GatewaySettings,
        log: TurnLog,
        facts: TurnStore,
        caught_up: Callable[[], Awaitable[bool]],
        *,
        bounds: Bounds,
        shared: Callable[[], bool],
    ) -> None:
        """
        Args:
            caught_up: waits for what other gateways have stored; returns whether it is all there.
            shared: returns whether there are several tenants.
        """
        self._settings, self._log, self._facts = settings, log, facts
        self._caught_up, self._bounds = caught_up, bounds
        self._large = FairQueue(_LARGE_AT_ONCE, settings.queue_timeout_s, shared=shared)  # of large bodies
        # Long encodings: one runs at a time, so that it leaves cores to streams, and in addition one of those that take
        # seconds.
        self._long, self._longest = (
            FairQueue(1, settings.queue_timeout_s, waiting=settings.in_flight) for _ in range(2)
        )

    async def read(
        self, http: web.Request, tenant: str, parse: Parse, *, private: bool = False, reads: Reads = read_body
    ) -> Taken:
        """Return a request and its prompt. Of large bodies few are in memory at once.

        Args:
            reads: reads the body, up to a number of bytes.

        Raises:
            LiveError: it is malformed, for another model, too long, or there is no room for it in time.
            ConnectionError: its client is gone.
        """
        most, lost = self._settings.body_kb * 1024, lost_of(http)
        large = room_of(http, most) > _LARGE
        async with self._large.hold(tenant, lost) if large else contextlib.nullcontext():
            raw = await reads(http, most)
            request = parse(raw)
            user = owner_of(tenant, user_of(http.headers, request.user))
            # Stored turns never continue a private one.
            owner = f"{user} private" if private else user

            async def drafted(draft: Draft) -> Prompt:
                if len(raw) < _LONG:
                    return draft()
                async with (self._longest if len(raw) > _LARGE else self._long).hold(tenant, lost):
                    return await asyncio.to_thread(draft)

            return Taken(request, user, owner, await self._prompt(request, owner, drafted))

    async def _prompt(self, request: Request, owner: str, drafted: Callable[[Draft], Awaitable[Prompt]]) -> Prompt:
        """Return the tokens of a request's prompt.

        Raises:
            LiveError: another model, messages that the template refuses, or too many tokens.
        """
        if request.model:
            check_model(request.model, self._settings.models)
        waits = bool(request.previous) and self._facts.waits_elsewhere
        with refusing_prompts(self._bounds.most):
            begun = self._bounds.begin(request)
            prompt = await self._following(request, owner, drafted)
            if (prompt is None or prompt.rewritten) and self._settings.count > 1 and await self._caught_up():
                prompt = await self._following(request, owner, drafted)
        if prompt is None:
            words = f"no response {request.previous!r} of yours is known here{' yet' * waits}; send all messages"
            raise LiveError("overloaded" if waits else "absent", words, field="previous_response_id")
        return completed_prompt(request, prompt, begun, self._bounds)

    async def _following(
        self, request: Request, owner: str, drafted: Callable[[Draft], Awaitable[Prompt]]
    ) -> Prompt | None:
        """Return the prompt from the known turns; None if the turn before it is not known."""
        draft = self._log.draft(request, owner)
        return None if draft is None else await drafted(draft)
