"""Responses that clients retrieve, delete and refer to: each is sealed under the data key of its turn."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from actors.gateway.meter import Meter
from actors.gateway.request_body import read_body
from actors.gateway.turn_store import TurnStore
from asyncrl.background import all_of
from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import read
from asyncrl.live.apis.body import Body, Message
from asyncrl.live.apis.response_items import REFERENCE, listed, references, resolved, turn_of
from asyncrl.live.apis.responses import RESPONSES_PATH
from asyncrl.live.apis.schema import LiveError, Request
from asyncrl.live.keys import Keys
from asyncrl.live.tenant_keys import owner_in, owner_of, user_of
from topics.turns import REPLY_KEPT, ReplyKept

_LIMIT_S = 5.0  # for the NATS server to answer
_ID = "resp_"


class Responses:
    """Stored responses of all gateways of the run."""

    def __init__(self, bus: Bus, facts: TurnStore, keys: Keys, meter: Meter) -> None:
        self._bus, self._facts, self._keys, self._meter = bus, facts, keys, meter

    @property
    def routes(self) -> list[web.RouteDef]:
        """Return the paths of one response."""
        path = RESPONSES_PATH + "/{id}"
        return [
            web.get(path, self._retrieve),
            web.delete(path, self._delete),
            web.get(f"{path}/input_items", self._list_input),
        ]

    def keeps(self, request: Request, *, private: bool) -> Request:
        """Return a request that says whether its response will be stored: of private and redacted turns none is."""
        if private or self._facts.redactor is not None:
            return msgspec.structs.replace(request, store=False, input=b"")
        return request

    async def keep(self, turn: str, tenant: str, body: bytes, request: Request, *, secret: str) -> None:
        """Store a response, before its client has all of it.

        Args:
            secret: data key of its turn.
        """
        await self._facts.put(ReplyKept(turn, tenant, body, request.input, secret), anyway=True)

    async def read_body(self, http: web.Request, most_bytes: int) -> bytes:
        """Return the body of a request, with the items that it refers to in the places of its references.

        Raises:
            LiveError: as `request_body.read_body`; an item is not stored, or another user's; or it is larger with them.
        """
        body = await read_body(http, most_bytes)
        if REFERENCE.encode() not in body or not (wanted := references(fields := Body(body))):
            return body
        tenant = self._keys.tenant(http.headers)
        owner = owner_of(tenant, user_of(http.headers, fields.named("safety_identifier", "user")))
        turns = {turn_of(one): one for one in wanted}
        kept = await all_of(*(self._read(turn, tenant, f"item {one!r}") for turn, one in turns.items()))
        items: dict[str, Message] = {}
        for one in kept:
            if owner_in(one.secret) == owner:
                items |= {item["id"]: item for item in msgspec.json.decode(one.body)["output"]}
        for name in wanted:
            if name not in items:
                raise _absent(f"item {name!r}", "input")
        return resolved(body, {name: items[name] for name in wanted}, most_bytes)

    async def _retrieve(self, http: web.Request) -> web.StreamResponse:
        kept = await self._asked(http)
        return web.Response(body=kept.body, content_type="application/json", charset="utf-8")

    async def _delete(self, http: web.Request) -> web.StreamResponse:
        kept = await self._asked(http)
        await self._facts.put(ReplyKept(kept.turn_id, kept.tenant, secret=kept.secret), anyway=True)
        return web.json_response({"id": f"{_ID}{kept.turn_id}", "object": "response", "deleted": True})

    async def _list_input(self, http: web.Request) -> web.StreamResponse:
        kept = await self._asked(http)
        if not kept.input:
            raise LiveError("absent", f"the input of {http.match_info['id']} was too large to be stored")
        items: list[dict[str, Any]] = msgspec.json.decode(kept.input)
        return web.json_response(listed(items, kept.turn_id, http.query))

    async def _asked(self, http: web.Request) -> ReplyKept:
        """Return the stored response that a path names; raises as `_read`."""
        key = self._keys.key(http.headers)
        self._meter.begin(key, replies=False)
        named = http.match_info["id"]
        turn = named.removeprefix(_ID)
        if not (named.startswith(_ID) and turn.isalnum() and turn.isascii()):
            raise _absent(f"response {named!r}", "id")
        return await self._read(turn, key.tenant, f"response {named!r}")

    async def _read(self, turn: str, tenant: str, named: str) -> ReplyKept:
        """Return the stored response of a turn.

        Args:
            named: what the client asks for.

        Raises:
            LiveError: there is none, it is another tenant's, or the server does not answer.
        """
        kept = None
        try:
            async with asyncio.timeout(_LIMIT_S):
                record = await read_last(self._bus, REPLY_KEPT, turn) if turn else None
                if record is not None and record.headers.get("tenant") == tenant:
                    kept = await read(self._bus, ReplyKept, record)
        except (SecretGone, BlobMissing):
            pass  # it was purged
        except (TimeoutError, BusError) as error:
            raise LiveError("overloaded", "stored responses cannot be read now; try again later") from error
        if kept is not None and kept.body:
            return kept
        if turn and record is None and (self._facts.waits or self._facts.waits_elsewhere):
            raise LiveError("overloaded", f"{named} may not be stored yet; try again later")
        raise _absent(named, "id")


def _absent(what: str, field: str) -> LiveError:
    words = "is stored here; it was never stored (store: false), or deleted or purged, or is another tenant's or user's"
    return LiveError("absent", f"no {what} {words}", field=field)
