"""Errors between an actor and its topics."""

from __future__ import annotations

from asyncrl.errors import AsyncRLError


class BusError(AsyncRLError):
    """Base of all faults of the bus."""


class BusUnreachable(BusError):
    """No NATS server answered, or it refused the credentials."""


class BusGone(BusError):
    """No acknowledgement within the publish deadline: the actor must give its work back and exit."""


class BusDenied(BusError):
    """The server's permissions do not allow this actor to publish that."""


class BusRefused(BusError):
    """The server answered with an error that a retry cannot mend."""

    def __init__(self, what: str, code: int, description: str) -> None:
        super().__init__(f"{what}: {description} (NATS error {code})")
        self.code = code
        self.description = description


class WrongSequence(BusError):
    """A compare-and-set append lost: the log, or the fence, has moved on."""


class Disconnected(AsyncRLError):
    """The connection broke during a request; it is unknown whether the request was carried out."""


class ProvisionError(BusError):
    """The server cannot hold this run's streams."""


class ServerFull(ProvisionError):
    """The server has no room for the sizes that this run's streams shall have."""

    def __init__(self, wanted: int) -> None:
        super().__init__(
            f"the run's streams reserve {wanted / 1e6:,.0f} MB on the NATS server, more than its max_file_store or the "
            "limit of this account leaves: make room there, or lower nats.stream_max_mb, nats.ledger_max_mb or "
            "gateway.turns_mb"
        )
