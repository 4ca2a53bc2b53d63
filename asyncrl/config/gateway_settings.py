"""Settings of the gateway: the table `[gateway]`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from asyncrl.config.setting_types import Positive, Seconds, Settings


class GatewaySettings(Settings):
    """The gateway: the HTTP APIs through which people and agents talk to the policy."""

    count: Annotated[int, Meta(ge=0, le=32)] = 0  # Gateways that share the port; 0: none.
    # Address of this machine that it listens on, without TLS.
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 8321  # Port that it listens on.
    # Names of models that requests may give; empty: any, and the list of models has the run's name.
    models: list[str] = msgspec.field(default_factory=list)
    # Tenants that get a key when the run starts, in the file `keys/NAME` of its directory; others: `asyncrl keys add`.
    tenants: list[str] = msgspec.field(default_factory=list)
    # Name of the group `[engine.groups.NAME]` that serves the gateway alone: its engines stay at the version of the
    # channel `live`. Empty: the engines of training answer, with the newest version that each has.
    engines: str = ""
    # Name of the group whose engines have the version of a canary, and without one that which is live; they answer the
    # canary's sessions alone. Empty: there are no canaries.
    canary_engines: str = ""
    max_new_tokens: Positive = 1024  # Tokens of a reply whose request names no limit.
    stream_tokens: Positive = 4  # Greatest number of tokens that wait to be streamed together.
    alive_s: Seconds = 5.0  # Seconds without a token after which a stream gets an event that keeps its client waiting.
    # Seconds that a reply may take in all, the wait for an engine included, before it fails as overloaded.
    deadline_s: Seconds = 600.0
    # Seconds that a request without a token may wait for a place or an engine before it is refused as overloaded.
    hold_s: Seconds = 20.0
    # Seconds for which the repeat of a request that was cut goes on with its reply.
    retry_s: Seconds = 300.0
    # Requests at once of each gateway; as many more wait, and further ones are refused as overloaded.
    in_flight: Positive = 256
    body_kb: Positive = 8192  # Greatest size of a request's body.
    history_tokens: Positive = 4_000_000  # Tokens of conversations that are kept to be continued, the newest.
    # MB of turns that wait on the disk while the NATS server is away; replies beyond it are given, and not recorded.
    spool_mb: Positive = 64
    # MB of turns that a run keeps; beyond it replies are given, and not recorded. All that are kept stay until its end.
    turns_mb: Positive = 512
