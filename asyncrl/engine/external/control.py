"""Control of a server that its owner has started."""

from __future__ import annotations

from asyncrl.engine.control import ServerSpec
from asyncrl.engine.http_control import HTTPControl


class ExternalControl(HTTPControl):
    """A server at the address of its announcement, or of the settings."""

    def __init__(self, home: ServerSpec) -> None:
        super().__init__(home, home.address or home.group.addresses[home.number])
