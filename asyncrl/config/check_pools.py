"""Groups of engines that serve one purpose alone, and contradict others."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.check import Finding
from asyncrl.config.pools import Purpose, own_groups, setting_of
from asyncrl.config.settings import Config

_SERVED: dict[Purpose, tuple[str, str]] = {
    "evaluations": ("evaluations", "evaluations are served by no others"),
    "live": ("the channel live", "the gateway asks no others"),
    "canary": ("canaries", "no others have their versions"),
}


def pool_contradictions(config: Config) -> Iterator[Finding]:
    """Settings of groups of engines of their own that cannot hold together."""
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
            message = f"{table} serves {what} alone, and no other group has an engine for training; add one"
            yield Finding((key, "engine.groups"), message)
        if purpose != "evaluations" and not config.gateway.count:
            yield Finding((key, "gateway.count"), "has no effect: there is no gateway (gateway.count); leave it out")
    yield from _canary_contradictions(config)


def _canary_contradictions(config: Config) -> Iterator[Finding]:
    """A canary needs engines of its own, a version that is live beside it, and a share of the sessions."""
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
