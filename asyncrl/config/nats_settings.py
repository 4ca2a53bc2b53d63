"""Settings of the NATS server.

The comment at a field, beside or above it, is its documentation: `asyncrl settings` and docs/settings.md print it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.setting_types import Count, Seconds, Settings


class NatsSettings(Settings):
    """NATS: the server that holds the topics."""

    # NATS URL, `nats://host:port` or `tls://host:port`, of a cluster several with commas between; empty starts one here
    # for this run.
    url: str = ""
    # IP address of this machine that a server started here listens on; `0.0.0.0` for all. It uses no TLS.
    host: str = "127.0.0.1"
    # Port of a server started here, of three the first of three in a row; 0: a free one, kept when the run goes on.
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    user: str = ""  # User name, when the URL needs one: all roles share it.
    password_file: str = ""  # File that holds the password (never the password itself).
    nkey_file: str = ""  # File that holds an nkey seed, instead of user and password.
    # Folder with a user for each role, as `asyncrl roles RUN --config FOLDER` makes it, instead of one for all.
    credentials: str = ""
    tls_ca: str = ""  # File with the certificates that sign the server's; empty for those the system trusts.
    tls_cert: str = ""  # Client certificate, where the server asks for one.
    tls_key: str = ""  # Its key.
    # MB that each payload stream may hold on the server's disk; 0 sizes them by the settings and the free disk.
    stream_max_mb: Count = 0
    # How long payload streams keep tokens: `checkpoint` until no kept checkpoint needs them, `run` until the end (to
    # replay a run from its beginning; `asyncrl check` prints the room that takes).
    keep: Literal["checkpoint", "run"] = "checkpoint"
    # NATS servers that the run starts here when `url` is empty; of three, any one may die at any time.
    servers: Literal[1, 3] = 1
    # Servers that keep each stream, on a cluster given as `url`; with `servers = 3` they are three.
    replicas: Literal[1, 3, 5] = 1
    # MB that each ledger log may hold on the server's disk; 0 sizes them by the settings and the free disk.
    ledger_max_mb: Count = 0
    # MB that the streams of a server started here may take on the disk; 0: what is free, but for a small rest.
    disk_max_mb: Count = 0
    # Seconds without an acknowledgement after which an actor gives its work back and exits.
    publish_deadline_s: Seconds = 120.0

    @property
    def copies(self) -> int:
        """Servers that keep each stream."""
        return self.replicas if self.url else self.servers
