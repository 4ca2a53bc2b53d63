"""Settings of live traffic that contradict others."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.check import Finding, is_address
from asyncrl.config.setting_types import changed_keys
from asyncrl.config.settings import Config

_OWN = {  # settings of each kind of judge, which no other has
    "rule": ("function", "children"),
    "endpoint": ("url", "model", "api_key_file", "temperature", "max_new_tokens"),
    "engine": ("temperature", "max_new_tokens"),
}


def live_contradictions(config: Config) -> Iterator[Finding]:
    """Settings of the gateway and of judges that cannot hold together."""
    judge, changed = config.live.judge, changed_keys(config.live.judge)
    if changed and not (config.gateway.count and judge.kind):
        why = "there is no gateway (gateway.count)" if judge.kind else "live.judge.kind names no judge"
        yield Finding(tuple(f"live.judge.{key}" for key in changed), f"has no effect: {why}; leave it out")
        return
    others = {key for keys in _OWN.values() for key in keys} - set(_OWN.get(judge.kind, ()))
    for key in [key for key in changed if key in others]:
        of = " or ".join(kind for kind, keys in _OWN.items() if key in keys)
        message = f'is of live.judge.kind = "{of}", found "{judge.kind}"; leave it out'
        yield Finding((f"live.judge.{key}", "live.judge.kind"), message)
    if judge.kind == "endpoint":
        if not is_address(judge.url, "http", "https"):
            yield Finding(("live.judge.url",), f'found "{judge.url}", expected http://host:port/v1')
        if not judge.model:
            yield Finding(("live.judge.model",), "is empty; name the model that the endpoint shall judge with")
    if judge.function and ":" not in judge.function:
        message = f'found "{judge.function}", expected path/to/file.py:function or package.module:function'
        yield Finding(("live.judge.function",), message)
