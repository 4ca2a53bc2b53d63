"""Keys and values of token prefixes that were computed before, in blocks, least recently used dropped first."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from asyncrl.engine.embedded.budget import BLOCK
from asyncrl.engine.embedded.paged import Paged

_Key = tuple[int | str | None, bytes]


class PrefixCache:
    """A chain of blocks per prefix, looked up by (identity of the block before, tokens of this one).

    Identities are never reused, so a block whose predecessor was dropped can never be reached; it ages out. The first
    block's predecessor is the request's `extra_key`: different keys share nothing.
    """

    def __init__(self, stores: Sequence[torch.Tensor], tokens: int) -> None:
        """Keep up to `tokens` tokens of stores, each [layer, kind, slot, head, position, width]."""
        self._stores = [(store, _pool(store, tokens // BLOCK)) for store in stores]
        self._most = self._room = tokens // BLOCK
        self._identities = itertools.count()
        self.clear()

    def __len__(self) -> int:
        """Tokens held."""
        return len(self._blocks) * BLOCK

    def clear(self) -> None:
        """Forget everything, and free the memory."""
        self._blocks: OrderedDict[_Key, tuple[int, int]] = OrderedDict()  # key -> identity, place in the pool
        self._free: list[int] = []
        self._unused = 0  # the first place that was never used
        for _, pool in self._stores:
            pool.free(0, pool.tensor.numel())

    def limit(self, tokens: int) -> None:
        """Keep at most this many tokens from now on."""
        self._room = min(self._most, max(0, tokens) // BLOCK)
        while len(self._blocks) > self._room:
            place = self._evict()
            self._free.append(place)
            for _, pool in self._stores:
                size = pool.tensor[place].numel()
                pool.free(place * size, size)

    def find(self, tokens: Sequence[int], extra_key: str | None) -> list[int]:
        """Return the blocks of the longest known prefix of `tokens`."""
        parent: int | str | None = extra_key
        found: list[tuple[_Key, int]] = []
        for piece in _blocks(tokens):
            block = self._blocks.get((parent, piece))
            if block is None:
                break
            found.append(((parent, piece), block[1]))
            parent = block[0]
        self._touch([key for key, _ in found])
        return [place for _, place in found]

    def load(self, places: Sequence[int], slot: int) -> None:
        """Copy blocks to the start of `slot`; valid until the next `save` or `limit`."""
        if places:
            for store, pool in self._stores:
                _window(store, slot, 0, len(places)).copy_(pool.tensor[list(places)])

    def save(self, tokens: Sequence[int], extra_key: str | None, slot: int) -> None:
        """Keep the whole blocks of `tokens`, whose keys and values are in `slot`."""
        parent: int | str | None = extra_key
        keys: list[_Key] = []
        places: list[int] = []  # of new blocks; all that follow a new one are new, too
        for piece in _blocks(tokens)[: self._room]:
            key = (parent, piece)
            block = self._blocks.get(key)
            if block is None:
                block = next(self._identities), self._take()
                self._blocks[key] = block
                places.append(block[1])
            else:
                self._blocks.move_to_end(key)  # so that it is not evicted for a block that follows it
            keys.append(key)
            parent = block[0]
        self._touch(keys)
        if places:
            for store, pool in self._stores:
                pool.tensor[places] = _window(store, slot, len(keys) - len(places), len(keys))

    def _touch(self, keys: list[_Key]) -> None:
        """The first block becomes the most recent, so that a chain is dropped from its end."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def _take(self) -> int:
        if len(self._blocks) >= self._room:
            return self._evict()
        if self._free:
            return self._free.pop()
        self._unused += 1
        return self._unused - 1

    def _evict(self) -> int:
        return self._blocks.popitem(last=False)[1][1]


def _pool(store: torch.Tensor, blocks: int) -> Paged:
    layers, kinds, _, heads, _, width = store.shape
    return Paged((max(blocks, 1), layers, kinds, heads, BLOCK, width), store.dtype)


def _window(store: torch.Tensor, slot: int, first: int, end: int) -> torch.Tensor:
    """[block, layer, kind, head, BLOCK, width] view of some blocks of the slot's tokens."""
    part = store[:, :, slot, :, first * BLOCK : end * BLOCK]
    return part.view(*part.shape[:3], end - first, BLOCK, part.shape[-1]).permute(3, 0, 1, 2, 4, 5)


def _blocks(tokens: Sequence[int]) -> list[bytes]:
    raw = np.asarray(tokens, np.int32).tobytes()
    size = BLOCK * 4
    return [raw[start : start + size] for start in range(0, len(raw) - size + 1, size)]
