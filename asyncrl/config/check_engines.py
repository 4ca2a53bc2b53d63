"""Settings of engines that contradict others: groups, servers, staged and direct weights, GPUs, growing pools."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from urllib.parse import urlsplit

from asyncrl.config.check import not_a_function, unused
from asyncrl.config.devices import gpus_of_learner, gpus_of_server
from asyncrl.config.engine_settings import KINDS, Capability, EngineGroup, EngineSettings, kind_of, kinds_with
from asyncrl.config.finding import Finding
from asyncrl.config.pools import SECOND, Purpose, lent_pools, own_groups, setting_of
from asyncrl.config.settings import Config, LearnerSettings
from asyncrl.config.trainers import TrainerCapability, trainer_kind
from asyncrl.config.worker_pools import pool_sizes
from asyncrl.host import VISIBLE_GPUS
from asyncrl.ports import is_ip, places_of
from topics.engines import check_address
from topics.roles import role_of

_SERVED: dict[Purpose, tuple[str, str]] = {
    "evaluations": ("evaluations", "evaluations are served by no others"),
    "live": ("the channel live", "the gateway asks no others"),
    "canary": ("canaries", "no others have their versions"),
    "judges": ("judges", "no others vote"),
    "rubrics": ("judges of rubrics", "no others judge"),
    "opponents": ("opponents", "no others answer context.opponent"),
}


def pool_contradictions(config: Config) -> Iterator[Finding]:
    """Contradictions in the settings of separate engine groups."""
    groups, own, taken = config.engine.groups, own_groups(config), dict[str, str]()
    for purpose, name in own.items():
        key, table = setting_of(purpose), f"engine.groups.{name}"
        what, why = _SERVED[purpose]
        if name not in groups:
            there = ", ".join(groups) or "none"
            message = f'found "{name}", expected the name of a group of engine.groups; there is {there}'
            yield Finding((key, "engine.groups"), message)
            continue
        if name in taken:
            yield Finding((key, taken[name]), f'both name the group "{name}", which serves one purpose; name another')
        taken[name] = key
        if not groups[name].servers:
            message = f"{table} has no engine, and {why}; add an address"
            yield Finding((f"{table}.addresses", key), message)
        if not any(group.servers for other, group in groups.items() if other not in own.values()):
            message = f"{table} serves only {what}, and no other group has an engine for training; add one"
            yield Finding((key, "engine.groups"), message)
        if purpose not in ("evaluations", "rubrics", "opponents") and not config.gateway.count:
            yield Finding((key, "gateway.count"), "has no effect: there is no gateway (gateway.count); leave it out")
    yield from _second_models(config)
    yield from _canary_contradictions(config)


def _second_models(config: Config) -> Iterator[Finding]:
    """Engines with a second model answer no request for the policy."""
    own = own_groups(config)
    allowed = {f"engine.groups.{own[purpose]}" for purpose in SECOND if purpose in own}
    for table, group in config.engine.tables.items():
        if group.model and table not in allowed:
            named = ", ".join(setting_of(purpose) for purpose in SECOND)
            message = f"the engines of {table} answer for the policy, and cannot have another model; expected a group "
            yield Finding((f"{table}.model",), f"{message}that {named} names")


def _canary_contradictions(config: Config) -> Iterator[Finding]:
    """A canary needs its own engines, a live version, and a share of the sessions."""
    gateway, canary = config.gateway, config.weights.canary
    if gateway.canary_engines and not gateway.engines:
        message = "a canary is compared with the version that is live; name engines of that, too"
        yield Finding(("gateway.canary_engines", "gateway.engines"), message)
    if canary.share and not gateway.canary_engines:
        message = "no engines have a canary's version; name a group of engines there"
        yield Finding(("weights.canary.share", "gateway.canary_engines"), message)
    if canary.newest and not canary.share:
        message = "the newest version becomes a canary for no session; give it a share"
        yield Finding(("weights.canary.newest", "weights.canary.share"), message)


def server_contradictions(config: Config) -> Iterator[Finding]:
    """Find settings with which servers do not start, or answer with weights without a known name."""
    yield from _addresses(config.engine)
    for name in KINDS:
        groups = {table: group for table, group in config.engine.tables.items() if group.kind == name}
        yield from kind_of(name).checks(groups, config.weights.update)
    for table, group in config.engine.tables.items():
        if group.can(Capability.PROCESSES, Capability.GPU):
            yield from _gpus(table, group)
        rollout = config.rollout
        if not group.of_kind.whole and (rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0):
            message = f"{group.of_kind.title} returns log-probs after these cuts; expected 1, -1 and 0"
            yield Finding((f"{table}.kind", "rollout.top_p", "rollout.top_k", "rollout.min_p"), message)


def _addresses(engine: EngineSettings) -> Iterator[Finding]:
    """Find invalid engine addresses, and servers that are named twice: two actors would alternately load weights.

    No name is looked up: this machine may not know it.
    """
    first: dict[tuple[str, int, str], str] = {}
    for table, group in engine.tables.items():
        for address in group.addresses:
            try:
                check_address(address)
            except ValueError:
                yield Finding((f"{table}.addresses",), f'found "{address}", expected http://host:port, without a login')
                continue
            for place in places_of(address, look_up=False):
                if (other := first.setdefault(place, address)) is not address:
                    same = f'"{address}"' if address == other else f'one server, as "{other}" and "{address}",'
                    keys = tuple(f"{table}.addresses" for table in engine.tables)
                    yield Finding(keys, f"{same} found more than once, expected each server once")
                    break


def _gpus(table: str, group: EngineGroup) -> Iterator[Finding]:
    if group.gpus and not len(group.gpus) % group.count and group.gpus_each != group.gpus_needed:
        message = (
            f"found {len(group.gpus)} GPUs for {group.count} servers, and one server takes {group.gpus_needed} by its "
            f"arguments ({group.of_kind.size_options}); expected {group.count * group.gpus_needed} GPUs"
        )
        yield Finding((f"{table}.gpus", f"{table}.count", f"{table}.arguments"), message)
    if group.gpus and VISIBLE_GPUS in group.environment:
        message = f"holds {VISIBLE_GPUS}, which the run itself sets for each server by gpus; remove one of them"
        yield Finding((f"{table}.environment", f"{table}.gpus"), message)


_HERE = ("localhost", "::1")


def direct_contradictions(config: Config) -> Iterator[Finding]:
    """Find settings that keep engines from taking weights from memory, staged or of the learner."""
    for table, group in config.engine.tables.items():
        if group.staged == "always" and (not group.can(Capability.STAGED) or group.gpus_needed > 1):
            found = f'a group of kind "{group.kind}" with {group.gpus_needed} GPUs a server'
            message = f'staged = "always" needs servers of one GPU that are started here, found {found}; set "never"'
            yield Finding((f"{table}.staged", f"{table}.kind"), message)
    way, learner = config.weights.transport, config.learner
    if way == "never" or not config.trains:
        return
    if not trainer_kind(learner.trainer).can(TrainerCapability.MODEL):
        message = f'the trainer "{learner.trainer}" has no weights in memory; set weights.transport = "never"'
        yield Finding(("weights.transport", "learner.trainer"), message)
    if (way == "nccl" and learner.device == "cpu") or (way == "gloo" and learner.device != "cpu"):
        other = 'a GPU; set learner.device, or weights.transport = "gloo"' if way == "nccl" else 'the CPU; set "nccl"'
        message = f'weights.transport = "{way}" found learner.device = "{learner.device}", expected {other}'
        yield Finding(("weights.transport", "learner.device"), message)
    for table, group in config.engine.tables.items():
        yield from _group(table, group, way, learner)


def _group(table: str, group: EngineGroup, way: str, learner: LearnerSettings) -> Iterator[Finding]:
    kind, gpu = (f"{table}.kind", "weights.transport"), learner.device != "cpu"
    if not group.can(Capability.MODEL):
        yield Finding(kind, 'scripted engines have no weights; set weights.transport = "never"')
    elif not group.can(Capability(way)) or (gpu and not group.can(Capability.GPU)):
        message = (
            f'"{group.kind}" servers cannot take weights by weights.transport = "{way}" of learner.device = '
            f'"{learner.device}"; expected ipc or gloo between CPU processes, ipc or nccl between GPUs, or "never"'
        )
        yield Finding((*kind, "learner.device"), message)
    away = [address for address in group.addresses if not _is_here(address)]
    if away:
        message = f"{away[0]} is on another host, which gets weights only from the store; set weights.transport"
        yield Finding((f"{table}.addresses", "weights.transport"), f'{message} = "never"')
    yield from group.of_kind.transport_checks(table, group, way)
    gpus = gpus_of_learner(learner)
    started = gpu and group.can(Capability.PROCESSES, Capability.GPU)
    if started and way == "ipc" and set(group.gpus) - {*gpus}:
        message = f"found {group.gpus}, expected GPUs of the learner, {[*gpus]}, for weights.transport = "
        yield Finding((f"{table}.gpus", "weights.transport"), f'{message}"ipc"; or set "nccl"')
    if started and way == "nccl" and (not group.gpus or {*group.gpus} & {*gpus}):
        message = f"found {group.gpus}, expected GPUs other than the learner's, {[*gpus]}, for weights.transport = "
        yield Finding((f"{table}.gpus", "weights.transport"), f'{message}"nccl"; on its GPUs set "ipc"')


def _is_here(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    return host in _HERE or (is_ip(host) and host.startswith("127."))


def share_contradictions(config: Config) -> Iterator[Finding]:
    """Find settings that keep learner and engines from sharing a GPU, by time or by memory."""
    placement = config.placement
    if placement.colocate != "memory":
        why = f'it is of placement.colocate = "memory", found "{placement.colocate}"'
        yield from unused(config, "placement", "placement.colocate", why, "learner_fraction", "engine_fraction")
    if placement.colocate != "none" and not config.trains:
        message = 'no learner runs here (only), with which engines could share a GPU; set placement.colocate = "none"'
        yield Finding(("placement.colocate", "only"), message)
    elif placement.colocate != "none" and not placement.one_machine:
        message = f'learner and engines have separate GPUs by placement.kind = "{placement.kind}"; leave share out'
        yield Finding(("placement.colocate", "placement.kind"), message)
    elif placement.colocate == "time_slice":
        yield from _turns(config)
    elif placement.colocate == "memory":
        yield from _memory(config)


def _turns(config: Config) -> Iterator[Finding]:
    trainer = config.learner.trainer
    if not trainer_kind(trainer).can(TrainerCapability.MODEL):
        message = f'the trainer "{trainer}" has nothing on a GPU; set placement.colocate = "none"'
        yield Finding(("learner.trainer", "placement.colocate"), message)
    if config.weights.transport != "never":
        message = 'the learner has left the GPU when engines load; set "never", or placement.colocate = "none"'
        yield Finding(("weights.transport", "placement.colocate"), message)
    if config.engine.router.count:
        message = 'a router does not follow turns on a GPU; set it to 0, or placement.colocate = "none"'
        yield Finding(("engine.router.count", "placement.colocate"), message)
    for purpose in own_groups(config):
        message = f"engines that serve only {purpose} keep their GPU; let all engines serve them"
        yield Finding((setting_of(purpose), "placement.colocate"), message)
    for table, group in config.engine.tables.items():
        if group.staged == "always":
            message = (
                'staged weights stay on the GPU when engines leave it; set "never", or placement.colocate = "none"'
            )
            yield Finding((f"{table}.staged", "placement.colocate"), message)
        if not group.can(Capability.SLEEP):
            kinds = " or ".join(kinds_with(Capability.SLEEP))
            message = f'"{group.kind}" servers are not this run\'s to empty; expected {kinds} for turns'
            yield Finding((f"{table}.kind", "placement.colocate"), message)
        if switch := group.missing_switch(Capability.SLEEP):
            message = (
                f'{group.of_kind.title} frees memory only with "{switch}"; add it for placement.colocate = "time_slice"'
            )
            yield Finding((f"{table}.arguments", "placement.colocate"), message)


def _memory(config: Config) -> Iterator[Finding]:
    placement, learner = config.placement, config.learner
    if not learner.device.startswith("cuda"):
        message = f'found "{learner.device}", expected cuda: parts of a GPU\'s memory are shared'
        yield Finding(("learner.device", "placement.colocate"), message)
        return
    gpus, stated = dict.fromkeys(gpus_of_learner(learner), placement.learner_fraction), placement.engine_fraction
    keys = ["placement.learner_fraction", *(["placement.engine_fraction"] if stated else [])]
    for table, group in config.engine.tables.items():
        keys += [f"{table}.arguments"] if group.on_gpus and not stated else []
        for gpu in chain(*(gpus_of_server(group, one) for one in range(group.count))) if group.on_gpus else ():
            part = stated or _fraction(group)
            if gpu in gpus and part is None:
                option = group.of_kind.memory_option
                message = f'state the part of the memory that a server takes: "{option}", a number between 0 and 1, or '
                message += "placement.engine_fraction"
                yield Finding((f"{table}.arguments", "placement.colocate"), message)
                return
            gpus |= {gpu: gpus[gpu] + (part or 0.0)} if gpu in gpus else {}
    for gpu, total in sorted(gpus.items()):
        if total > 1.0:
            message = f"learner and servers take {total:g} of the memory of GPU {gpu} together, expected at most 1"
            yield Finding(tuple(keys), message)
            return


def _fraction(group: EngineGroup) -> float | None:
    """The part of a GPU's memory that a server takes; None where its arguments do not say."""
    try:
        found = float(group.value_of(group.of_kind.memory_option))
    except ValueError:
        return None
    return found if 0.0 < found < 1.0 else None


def autoscale_contradictions(config: Config) -> Iterator[Finding]:
    """Settings of `[autoscale]` that cannot hold."""
    settings = config.autoscale
    if not settings.pools:
        why = "autoscale.pools names no pool, such as rollout = { min = 1, max = 4 }"
        yield from unused(config, "autoscale", "autoscale.pools", why)
        return
    most = _scaled(config)
    for pool, bounds in settings.pools.items():
        key = f"autoscale.pools.{pool}"
        if pool not in most:
            yield Finding((key,), f'found "{pool}", expected one of {", ".join(most) or "none: nothing can be scaled"}')
        elif bounds.min > bounds.max:
            message = f"found min = {bounds.min} and max = {bounds.max}; expected min to be at most max"
            yield Finding((f"{key}.min", f"{key}.max"), message)
        elif bounds.max > most[pool]:
            message = f"found {bounds.max}, but there are GPUs for {most[pool]}; lower it or add to the GPUs of {pool}"
            yield Finding((f"{key}.max",), message)
    if settings.function:
        yield from not_a_function("autoscale.function", settings.function)
        of_rule, why = ("grow_waiting", "shrink_idle", "window_s"), "autoscale.function decides instead of the rule"
        yield from unused(config, "autoscale", "autoscale.function", why, *of_rule)


def lent_contradictions(config: Config) -> Iterator[Finding]:
    """Find what else would decide about processes that `asyncrl share` divides among runs."""
    lent, placement = lent_pools(config), config.placement
    for pool in lent:
        if pool in config.autoscale.pools:
            message = f"both change how many processes {pool} has; take its role out of one of them"
            yield Finding(("placement.lent", f"autoscale.pools.{pool}"), message)
    if "engine" in placement.lent and placement.colocate != "none":
        message = 'an engine on the learner\'s GPU cannot go to another run; take engine out, or set "none"'
        yield Finding(("placement.lent", "placement.colocate"), message)


def _scaled(config: Config) -> dict[str, int]:
    """The pools of this run whose number a rule may change, with the most processes that each can have."""
    pools = {
        "rollout": config.rollout.workers,
        "reward": config.reward.workers,
        "groupreward": config.group_workers,
        "judge": config.judges,
        **pool_sizes(config),
        **{pool: group.servers for pool, group in config.engine.pools.items() if not group.can(Capability.ADDRESSES)},
    }
    engines = {pool: group.most for pool, group in config.engine.pools.items()}
    return {
        pool: engines.get(pool, 1 << 20)
        for pool, count in pools.items()
        if count and (not config.only or role_of(pool) in config.only)
    }
