"""The data keys of a gateway: one for each tenant, user and day, made when the first turn of it comes."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import OrderedDict

from actors.gateway.facts import Facts
from actors.runtime.actor import Context
from asyncrl.live.owners import day_of, new_secret
from asyncrl.live.turn_log import TurnLog
from topics.secrets import PurgeRequested, SecretMade

_CURRENT = 65_536  # users whose key is remembered; another one is made for one who comes back


class DataKeys:
    """Makes data keys, and forgets those that are erased. Gateways make their own: none waits for another."""

    def __init__(self, context: Context, facts: Facts, log: TurnLog) -> None:
        self._context = context
        self._facts = facts
        self._log = log
        self._current: OrderedDict[tuple[str, str], str] = OrderedDict()  # by owner and day
        self._making = asyncio.Lock()

    async def of(self, owner: str) -> str:
        """Return the id of the key that an owner's turns of today are sealed under, once it is stored, or waits to be
        before anything that is sealed under it."""
        now_s = time.time()
        place = owner, day_of(now_s)
        async with self._making:
            if (known := self._current.get(place)) is not None:
                return known
            secret = new_secret(owner, now_s)
            key = secrets.token_bytes(32)
            self._context.bus.vault.put(secret, key, until_s=math.inf)
            if await self._facts.put(SecretMade(secret, key), anyway=True):
                self._current[place] = secret
                if len(self._current) > _CURRENT:
                    self._current.popitem(last=False)
            return secret

    def purge(self, purge: PurgeRequested) -> None:
        """Forget keys that are erased, and all that was said under them: a turn that comes begins anew."""
        self._context.bus.vault.erase(purge.secrets)
        erased = set(purge.secrets)
        for place in [place for place, secret in self._current.items() if secret in erased]:
            del self._current[place]
        self._log.purge(erased)
