"""Settings of the ways of weights into engines, staged or direct, that cannot hold together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias
from urllib.parse import urlsplit

from asyncrl.config.engine_settings import EngineGroup
from asyncrl.config.setting_types import SCRIPTED
from asyncrl.config.settings import Config, LearnerSettings
from asyncrl.ports import is_ip

Problem: TypeAlias = tuple[tuple[str, ...], str]  # keys of settings, and what is wrong with them

_HERE = ("localhost", "::1")


def direct_problems(config: Config) -> Iterator[Problem]:
    """Find settings that keep engines from taking weights out of memory: that beside a server, or the learner's."""
    for table, group in config.engine.tables.items():
        if group.staged and (group.kind not in ("embedded", "sglang") or group.gpus_needed > 1):
            found = f'a group of kind "{group.kind}" with {group.gpus_needed} GPUs a server'
            message = f"staged = true needs servers of one GPU that are started here, found {found}; set it to false"
            yield ((f"{table}.staged", f"{table}.kind"), message)
    way, learner = config.weights.direct, config.learner
    if way == "never" or not config.trains:
        return
    if learner.trainer == SCRIPTED:
        message = 'a scripted trainer has no weights in memory; set weights.direct = "never"'
        yield (("weights.direct", "learner.trainer"), message)
    if (way == "nccl" and learner.device == "cpu") or (way == "gloo" and learner.device != "cpu"):
        other = 'a GPU; set learner.device, or weights.direct = "gloo"' if way == "nccl" else 'the CPU; set "nccl"'
        message = f'weights.direct = "{way}" found learner.device = "{learner.device}", expected {other}'
        yield (("weights.direct", "learner.device"), message)
    for table, group in config.engine.tables.items():
        yield from _group(table, group, way, learner)


def _group(table: str, group: EngineGroup, way: str, learner: LearnerSettings) -> Iterator[Problem]:
    kind, gpu = (f"{table}.kind", "weights.direct"), learner.device != "cpu"
    if group.kind == SCRIPTED:
        yield (kind, 'scripted engines have no weights; set weights.direct = "never"')
    if (group.kind == "embedded" and (gpu or way == "nccl")) or (group.kind == "sglang" and way == "gloo"):
        message = (
            f'"{group.kind}" servers cannot take weights by weights.direct = "{way}" of learner.device = '
            f'"{learner.device}"; expected ipc or gloo between CPU processes, ipc or nccl between GPUs, or "never"'
        )
        yield ((*kind, "learner.device"), message)
    away = [address for address in group.addresses if not _is_here(address)]
    if away:
        message = f"{away[0]} is on another host, which gets weights from the store alone; set weights.direct"
        yield ((f"{table}.addresses", "weights.direct"), f'{message} = "never"')
    if way == "ipc" and group.gpus_needed > 1:
        message = f'one process reads the memory, found {group.gpus_needed} ranks; set weights.direct = "nccl"'
        yield ((f"{table}.arguments", "weights.direct"), message)
    if way == "nccl" and group.copies > 1:
        message = f"weights reach the ranks of one tensor-parallel model alone, found {group.copies} of them by "
        keys = (f"{table}.arguments", "weights.direct")
        yield keys, message + '--pp-size and --dp-size; set --enable-dp-attention, or weights.direct = "never"'
    own = int(learner.device.partition(":")[2] or 0)
    if group.kind == "sglang" and gpu and way == "ipc" and set(group.gpus) - {own}:
        message = f'found {group.gpus}, expected the learner\'s GPU {own} for weights.direct = "ipc"; or set "nccl"'
        yield ((f"{table}.gpus", "weights.direct"), message)
    if group.kind == "sglang" and gpu and way == "nccl" and (not group.gpus or own in group.gpus):
        message = f'found {group.gpus}, expected GPUs other than the learner\'s {own} for weights.direct = "nccl"'
        yield ((f"{table}.gpus", "weights.direct"), f'{message}; on one GPU set "ipc"')


def _is_here(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    return host in _HERE or (is_ip(host) and host.startswith("127."))
