"""The kind of the embedded servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.engine_settings import Capability, EngineGroup, EngineKind, EngineSettings


class Embedded(EngineKind):
    """CPU servers of small models."""

    title = "the embedded engine"
    capabilities = frozenset(
        {
            Capability.PROCESSES,
            Capability.MODEL,
            Capability.STAGED,
            Capability.IPC,
            Capability.GLOO,
            Capability.SLEEP,
            Capability.SEEDS,
            Capability.EXPERTS,
        }
    )
    control = "asyncrl.engine.embedded.control:EmbeddedControl"

    def check_model(self, model: Path) -> None:
        from asyncrl.engine.embedded.config import read_config

        read_config(model)

    def memory_lines(self, table: str, group: EngineGroup, engine: EngineSettings, model: Path) -> Iterator[str]:
        from asyncrl.engine.embedded.budget import memory_share, token_budget, token_bytes
        from asyncrl.engine.embedded.config import read_shape

        shape, itemsize = read_shape(model), 4 if group.value_of("--dtype") in ("", "float32") else 2
        tokens = token_budget(shape, itemsize, memory_share(engine, group))
        size = tokens * token_bytes(shape, itemsize)
        length = engine.context or shape.max_positions
        yield (
            f"{table}: keys and values may take {size / 2**30:.1f} GiB of the free memory: {tokens:,} tokens, "
            f"{tokens // length} requests of full length ({length:,} tokens); more wait until others end"
        )
        if tokens < length:
            yield (
                f"{table}: a request ends with reason length at {tokens:,} tokens; free memory, or let keys and values "
                f'have more of it: {table}.arguments = ["--mem-fraction-static", "0.5"]'
            )


KIND = Embedded()
