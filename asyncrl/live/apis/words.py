"""Common ground of the HTTP APIs: a request, a reply and a refusal, in no API's own terms."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from asyncrl.errors import AsyncRLError

Fault = Literal["invalid", "key", "forbidden", "absent", "large", "limited", "internal", "overloaded"]

_OVERLOAD_S = 1  # an engine or a place may be there at any time


class LiveError(AsyncRLError):
    """A refusal of one HTTP request; each API has its own shape and status for a `fault`."""

    def __init__(self, fault: Fault, message: str, *, field: str | None = None, retry_s: int | None = None) -> None:
        super().__init__(message)
        if fault == "overloaded" and retry_s is None:
            retry_s = _OVERLOAD_S
        self.retry_s = retry_s  # seconds after which it may be tried again, where that is known
        self.fault = fault
        self.field = field  # of the body, where one is at fault


class Call(msgspec.Struct, frozen=True):
    """A call of a tool."""

    id: str
    name: str
    arguments: dict[str, Any]

    @property
    def text(self) -> str:
        """Return its arguments as JSON."""
        return msgspec.json.encode(self.arguments).decode()


def assistant_message(text: str, calls: list[Call]) -> dict[str, Any]:
    """Return a message of the assistant as chat templates take it."""
    if not calls:
        return {"role": "assistant", "content": text}
    called = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    return {"role": "assistant", "content": text, "tool_calls": called}


class Request(msgspec.Struct, frozen=True):
    """A request for one reply; None stands for what the request leaves to the gateway."""

    model: str
    messages: list[dict[str, Any]]  # as chat templates take them, contents are text; the last is not the assistant's
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: list[str] = []
    seed: int | None = None
    stream: bool = False
    tools: list[dict[str, Any]] = []  # as chat templates take them
    previous: str = ""  # the turn that it follows, of which it gives no messages; "": it gives all
    parallel: bool = True  # the reply may have several calls
    usage: bool = False  # the stream tells its tokens; only chat completions ask
    user: str = ""  # of the client, who says so
    logprobs: bool = False  # of the tokens of the reply are wanted


class Opening(msgspec.Struct, frozen=True):
    """The facts of a reply before its first token."""

    turn: str  # id of the turn, which the ids of an API are made of
    model: str
    created: int  # seconds since 1970
    prompt_tokens: int


class Sampled(msgspec.Struct, frozen=True):
    """A token of a reply; half a character reads as the replacement character."""

    text: str
    logprob: float  # natural log, at the request's temperature, before top-p and top-k


class Ending(msgspec.Struct, frozen=True):
    """The facts of a reply after its last token."""

    text: str  # all of it, without the stop sequence
    tokens: int  # sampled ones
    finish: Literal["stop", "length"]
    stop: str | None = None  # the stop sequence that ended it
    calls: list[Call] = []  # of tools; not in the text
    sampled: list[Sampled] | None = None  # all tokens but the end of the reply; None where nobody asked


class Events(Protocol):
    """One reply as server-sent events. Each method returns what is to be written next, b"" for nothing."""

    def begin(self) -> bytes:
        """Return the events before the first token."""

    def text(self, delta: str) -> bytes:
        """Return the events of new text."""

    def call(self, call: Call) -> bytes:
        """Return the events of a call of a tool."""

    def alive(self) -> bytes:
        """Return an event that changes nothing, and keeps a client's timers from running out."""

    def end(self, ending: Ending) -> bytes:
        """Return the last events of a reply that is whole."""

    def fail(self, error: LiveError) -> bytes:
        """Return the last events of a reply that ends early."""


class Api(Protocol):
    """One HTTP API."""

    path: str

    def parse(self, body: bytes) -> Request:
        """Read the body of a request.

        Raises:
            LiveError: it is malformed, or asks for what the gateway does not have; the message names the field.
        """

    def whole(self, opening: Opening, ending: Ending) -> dict[str, Any]:
        """Return the body of a reply that is not streamed."""

    def events(self, opening: Opening, request: Request) -> Events:
        """Return the renderer of a streamed reply."""

    def error(self, error: LiveError, turn: str) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of a refusal; `turn` identifies the request where the API has a place."""


def event(data: dict[str, Any], name: str = "") -> bytes:
    """Return one server-sent event; without a name it has no `event:` line."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
