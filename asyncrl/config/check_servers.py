"""Settings of servers started here that cannot hold together: their GPUs, ports and roles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from asyncrl.config.engine_settings import EngineGroup
from asyncrl.config.settings import Config

Problem: TypeAlias = tuple[tuple[str, ...], str]  # keys of settings, and what is wrong with them


def server_problems(config: Config) -> Iterator[Problem]:
    """Find settings with which servers do not start, or answer with weights that nobody can name."""
    groups = {table: group for table, group in config.engine.tables.items() if group.kind == "sglang"}
    for table, group in groups.items():
        yield from _gpus(table, group)
    prefill = {table: group for table, group in groups.items() if group.role == "prefill"}
    yield from _bootstrap_ports(prefill)
    if prefill and config.weights.update == "in_place":
        message = "tokens name the weights of a decode server, and a prefill server may have newer ones under requests "
        keys = tuple(f"{table}.arguments" for table in prefill)
        yield (*keys, "weights.update"), message + 'that stay; set weights.update = "resume"'


def _gpus(table: str, group: EngineGroup) -> Iterator[Problem]:
    if group.gpus and not len(group.gpus) % group.count and group.gpus_each != group.gpus_needed:
        message = (
            f"found {len(group.gpus)} GPUs for {group.count} servers, and one server takes {group.gpus_needed} by its "
            f"arguments (--tp-size, --pp-size, --dp-size); expected {group.count * group.gpus_needed} GPUs"
        )
        yield (f"{table}.gpus", f"{table}.count", f"{table}.arguments"), message
    if group.gpus and "CUDA_VISIBLE_DEVICES" in group.environment:
        message = "holds CUDA_VISIBLE_DEVICES, which the run itself sets for each server by gpus; remove one of them"
        yield (f"{table}.environment", f"{table}.gpus"), message


def _bootstrap_ports(groups: dict[str, EngineGroup]) -> Iterator[Problem]:
    taken: dict[int, str] = {}
    for table, group in groups.items():
        servers = max(group.count, group.most if group.gpus else 0)
        for port in range(group.bootstrap_port, group.bootstrap_port + servers):
            if other := taken.get(port):
                message = f"prefill servers of both groups would listen at port {port}; set another "
                keys = (f"{other}.arguments", f"{table}.arguments")
                yield keys, message + f"--disaggregation-bootstrap-port in {table}.arguments"
                break
            taken[port] = table


def live_problems(config: Config) -> Iterator[Problem]:
    """Return contradictions of learning from live traffic."""
    if config.live.share and not config.gateway.count:
        message = (
            f"live.share = {config.live.share:g}, but there is no gateway whose turns could be trained; "
            "set gateway.count to 1, or live.share to 0"
        )
        yield ("live.share", "gateway.count"), message
