"""Memory that an idle engine gives back for a time: weights, keys and values."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from contextlib import suppress

from asyncrl.engine.embedded.model import Model
from asyncrl.engine.embedded.prefix import PrefixCache
from asyncrl.engine.embedded.weights import Weights
from asyncrl.engine.errors import EngineRefused

WEIGHTS, CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"
TAGS = (WEIGHTS, CACHE, GRAPHS)
"""Parts of a server's memory, as SGLang calls them; there are no graphs on a CPU."""


class Memory:
    """The weights and the key-value store of a model, which are there or given back.

    Weights come back without content: until an update has brought it, the engine samples nothing.
    """

    def __init__(self, model: Model, cache: PrefixCache) -> None:
        self._model, self._cache = model, cache
        self._away: set[str] = set()  # tags that are given back
        self._blank = False  # no weights came since they were given back

    @property
    def whole(self) -> bool:
        """Return whether all is there that a step reads."""
        return not self._away and not self._blank

    def release(self, tags: Collection[str]) -> None:
        """Give parts back; those that are away stay away.

        Raises:
            EngineRefused: an unknown tag.
        """
        for tag in _known(tags):
            if tag in self._away:
                continue
            if tag == WEIGHTS and not self._blank:
                del self._model.weights
                self._blank = True
            elif tag == CACHE:
                self._cache.clear()
                self._model.free_all()
            self._away.add(tag)

    def resume(self, tags: Collection[str]) -> None:
        """Take parts again; existing ones are not changed.

        Raises:
            EngineRefused: an unknown tag.
        """
        for tag in _known(tags):
            self._away.discard(tag)

    def fill(self, weights: Weights) -> None:
        """Let the model have other weights.

        Raises:
            EngineRefused: their memory is away.
        """
        if WEIGHTS in self._away:
            raise EngineRefused("the memory of the weights is released; call resume_memory_occupation first")
        self._model.weights = weights
        self._blank = False
        with suppress(AttributeError):  # where the C library has such a call: it keeps what the old ones took
            ctypes.CDLL(None).malloc_trim(0)


def _known(tags: Collection[str]) -> Collection[str]:
    for tag in tags:
        if tag not in TAGS:
            raise EngineRefused(f"tag {tag!r}; expected one of {', '.join(TAGS)}")
    return tags
