"""The data keys of a gateway: one for each tenant, user and day, made when the first turn of it comes."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import OrderedDict

from actors.gateway.turn_store import TurnStore
from actors.runtime.actor import Context
from asyncrl.live.tenant_keys import covers, day_of, new_secret
from asyncrl.live.turn_log import TurnLog
from topics.secrets import PurgeRequested, SecretMade

_CURRENT = 65_536  # users whose key is remembered; another one is made for one who comes back


class DataKeys:
    """Makes data keys, and forgets those that are erased. Gateways make their own: none waits for another."""

    def __init__(self, context: Context, facts: TurnStore, log: TurnLog) -> None:
        self._context = context
        self._facts = facts
        self._log = log
        # By owner and day, with when each was made, ns since 1970.
        self._current: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()
        self._making = asyncio.Lock()

    async def of(self, owner: str) -> str:
        """Return the id of the key that an owner's turns of today are sealed under, once it is stored, or waits to be
        before anything that is sealed under it."""
        now_ns = time.time_ns()
        place = owner, day_of(now_ns / 1e9)
        async with self._making:
            if (known := self._current.get(place)) is not None:
                return known[0]
            secret = new_secret(owner, now_ns / 1e9)
            key = secrets.token_bytes(32)
            self._context.bus.vault.put(secret, key, until_s=math.inf)
            if await self._facts.put(SecretMade(secret, key), anyway=True):
                self._current[place] = secret, now_ns
                if len(self._current) > _CURRENT:
                    self._current.popitem(last=False)
            return secret

    def purge(self, purge: PurgeRequested, at_ns: int) -> None:
        """Forget keys that are erased, and all conversations under them: a later turn begins a new conversation.

        Args:
            at_ns: when it was asked for, since 1970. It does not name keys that wait to be stored.
        """
        made = [secret for secret, made_ns in self._current.values() if made_ns < at_ns]
        erased = {*purge.secrets, *(secret for secret in made if covers(secret, purge.owner, purge.before))}
        self._context.bus.vault.erase(erased)
        for place in [place for place, (secret, _) in self._current.items() if secret in erased]:
            del self._current[place]
        self._log.purge(erased)
        self._facts.purge(purge, at_ns)
