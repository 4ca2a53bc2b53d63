"""Common ground of the HTTP APIs: a request, a reply and a refusal, in no API's own terms."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from asyncrl.errors import AsyncRLError

Fault = Literal["invalid", "key", "forbidden", "absent", "large", "limited", "internal", "overloaded"]

TOO_LONG = "context_length_exceeded"
"""The code of a refusal of a prompt that the model cannot take."""

_OVERLOAD_S = 1  # an engine or a place may be there at any time


class LiveError(AsyncRLError):
    """A refusal of one HTTP request; each API has its own shape and status for a `fault`."""

    def __init__(
        self,
        fault: Fault,
        message: str,
        *,
        field: str | None = None,
        retry_s: int | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        if fault == "overloaded" and retry_s is None:
            retry_s = _OVERLOAD_S
        self.retry_s = retry_s  # seconds after which to try again, if known
        self.fault = fault
        self.field = field  # of the body, if one is at fault
        self.code = code  # in the words of its API, by which agents and SDKs know what to do; None: that of the fault


class Call(msgspec.Struct, frozen=True):
    """A call of a tool."""

    id: str
    name: str
    arguments: dict[str, Any]

    @property
    def text(self) -> str:
        """Return its arguments as JSON."""
        return msgspec.json.encode(self.arguments).decode()


class Thought(msgspec.Struct, frozen=True):
    """A part of the reasoning before a reply."""

    text: str


Piece: TypeAlias = str | Call | Thought  # of a reply: text, a whole call of a tool, reasoning


def assistant_message(text: str, calls: list[Call], *, thoughts: str = "", turn: str = "") -> dict[str, Any]:
    """Return a message of the assistant as chat templates take it.

    Args:
        thoughts: the reasoning before it, as its client knows it.
        turn: that gave it, as its client says; "": not known.
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message | ({"reasoning_content": thoughts} if thoughts else {}) | ({"turn": turn} if turn else {})


class Request(msgspec.Struct, frozen=True):
    """A request for one reply; None leaves a value to the gateway."""

    model: str
    messages: list[dict[str, Any]]  # as chat templates take them, contents are text; the last is not the assistant's
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    logit_bias: dict[str, float] = {}  # by token id
    stop: list[str] = []
    stop_ids: list[int] = []  # tokens that end the reply
    seed: int | None = None
    stream: bool = False
    tools: list[dict[str, Any]] = []  # as chat templates take them
    previous: str = ""  # the turn that it follows, of which it gives no messages; "": it gives all
    parallel: bool = True  # the reply may have several calls
    usage: bool = False  # the stream reports its tokens; only chat completions ask
    user: str = ""  # of the client, who says so
    logprobs: bool = False  # of the tokens of the reply are wanted
    top_logprobs: int = 0  # of this many likeliest tokens at each position
    forced: str | None = None  # the tool that it must call; "": any; None: it may answer without
    schema: str = ""  # JSON schema of the reply, as JSON; "": any text
    thoughts: Literal["", "text", "summary"] = ""  # how the reasoning before the reply is returned; "": not at all
    reasons: bool = True  # False: the reply begins without reasoning
    variables: dict[str, Any] = {}  # of the chat template
    raw: str | list[int] | None = None  # the whole prompt, as text or tokens; None: the template writes the messages
    special: bool = True  # the tokenizer puts its own tokens around such a text
    token_ids: bool = False  # of prompt and reply are wanted
    sealed_thoughts: bool = False  # with a reference to the turn, by which the client gives it back
    choices: int = 1  # replies to it
    store: bool = False  # the client may retrieve the reply later
    input: bytes = b""  # items of the request, a list as JSON; b"": not kept
    repeated: dict[str, Any] = {}  # fields that a reply of its API repeats, as they came

    def without_prompt(self) -> Request:
        """Return the parts that are needed after its prompt is written: the rest may be megabytes, and the request may
        wait long.
        """
        names = [tool.get("function", {}).get("name") for tool in self.tools]
        tools: list[dict[str, Any]] = [{"function": {"name": name}} for name in names]
        return msgspec.structs.replace(self, messages=[], tools=tools, user="", raw=None if self.raw is None else "")

    @property
    def penalised(self) -> str:
        """Return the field by which some tokens are to be less likely, or more; "" for none."""
        changed = {
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty != 1,
            "logit_bias": self.logit_bias,
        }
        return next((name for name, value in changed.items() if value), "")


class Opening(msgspec.Struct, frozen=True):
    """The facts of a reply before its first token."""

    turn: str  # id of the turn, which the ids of an API are made of
    model: str
    created: int  # seconds since 1970
    prompt_tokens: int
    prompt_ids: list[int] | None = None  # its tokens; None where they were not asked for


class Sampled(msgspec.Struct, frozen=True):
    """A token of a reply; half a character reads as the replacement character."""

    text: str
    logprob: float  # natural log, at the request's temperature, before top-p and top-k
    top: list[tuple[str, float]] = []  # the likeliest tokens in its place, with theirs


class Ending(msgspec.Struct, frozen=True):
    """The facts of a reply after its last token."""

    text: str  # all of it, without the stop sequence
    tokens: int  # sampled ones
    finish: Literal["stop", "length"]
    stop: str | None = None  # the stop sequence that ended it
    calls: list[Call] = []  # of tools; not in the text
    sampled: list[Sampled] | None = None  # all tokens except the end of the reply; None if they were not requested
    thoughts: str = ""  # reasoning before the text, which is not part of it
    thought_tokens: int = 0  # of `tokens`
    cached: int = 0  # tokens of the prompt that the engine had in its prefix cache
    versions: tuple[int, int] | None = None  # of the weights: the oldest and the newest that sampled a token
    ids: list[int] | None = None  # of the tokens; None where they were not asked for


class Events(Protocol):
    """One reply as server-sent events. Each method returns the next bytes to write, b"" for nothing."""

    response: dict[str, Any] | None  # of a reply that is whole: what a client may retrieve later; None: nothing

    def begin(self) -> bytes:
        """Return the events before the first token."""

    def text(self, delta: str) -> bytes:
        """Return the events of new text."""

    def call(self, call: Call) -> bytes:
        """Return the events of a call of a tool."""

    def thought(self, delta: str) -> bytes:
        """Return the events of new reasoning; all of it comes before the text."""

    def alive(self) -> bytes:
        """Return an event that changes nothing, and keeps a client's timers from running out."""

    def end(self, ending: Ending) -> bytes:
        """Return the last events of a reply that is whole."""

    def done(self, endings: list[Ending]) -> bytes:
        """Return the bytes after the ends of all replies to the request."""

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

    def whole(self, opening: Opening, request: Request, endings: list[Ending]) -> dict[str, Any]:
        """Return the body of a reply that is not streamed; of several, where the request asks for that."""

    def events(self, opening: Opening, request: Request, choice: int = 0) -> Events:
        """Return the renderer of a streamed reply; `choice` is its number among those to the request."""

    def error(self, error: LiveError, turn: str) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of a refusal; `turn` identifies the request where the API has a place."""


def event(data: dict[str, Any], name: str = "") -> bytes:
    """Return one server-sent event; without a name it has no `event:` line."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
