"""What can go wrong between a sampler and its engine."""

from __future__ import annotations


class EngineError(RuntimeError):
    """The engine cannot do what was asked: what was found, what was expected, what to do."""


class EngineRefused(EngineError):
    """The engine understood the request and will never accept it (HTTP 400). Do not retry."""


class EngineUnavailable(EngineError):
    """The engine could not be reached, broke off, or answered with a server fault. Retry, here or elsewhere."""

    def __init__(self, address: str, detail: str) -> None:
        super().__init__(f"engine {address}: {detail}")
        self.address = address
        self.detail = detail
