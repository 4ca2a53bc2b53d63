"""OpenAI Responses, `/v1/responses`."""

from __future__ import annotations

from typing import Any, Literal

from asyncrl.live.apis.body import OPENAI_ROLES, Body, Message, answerable, message_of, refusal, schema_of, shown
from asyncrl.live.apis.echoed_fields import REPEATED, repeated_of
from asyncrl.live.apis.openai import openai_error, reasoning_of, token_logprobs, top_of
from asyncrl.live.apis.response_items import input_of
from asyncrl.live.apis.schema import Call, Ending, Events, LiveError, Opening, Request, assistant_message, event
from asyncrl.live.apis.tool_fields import HOSTED, WORDS, call_of, chosen, declared, result_of

RESPONSES_PATH = "/v1/responses"
READ = (
    *("model", "input", "instructions", "max_output_tokens", "temperature", "top_p", "stream"),
    *("tools", "tool_choice", "parallel_tool_calls", "previous_response_id", "user", "safety_identifier"),
    *("include", "reasoning", "text", "top_logprobs", "chat_template_kwargs", "store"),
)
IGNORED = (
    *("metadata", "service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("max_tool_calls", "stream_options", "client_metadata"),
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {"background": (False,), "truncation": ("disabled", "auto")}
# Of `include`; the rest of it changes nothing here.
_LOGPROBS, _SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
# Begin the ids of a response and of its message; the rest is its turn's.
_ID, _MESSAGE = "resp_", "msg_"


class Responses:
    """See `Api`."""

    path = RESPONSES_PATH

    def parse(self, body: bytes) -> Request:
        fields = Body(body)
        fields.only(READ, IGNORED, _NEUTRAL)
        first = fields.get("instructions")
        messages: list[Message] = [{"role": "system", "content": fields.text("instructions")}] if first else []
        given = fields.get("input")
        if isinstance(given, str):
            messages.append({"role": "user", "content": given})
        else:
            for number, entry in enumerate(fields.entries("input")):
                _take(fields, messages, entry, f"input[{number}]")
        messages = [_whole(message) for message in messages]
        included = given if isinstance(given := fields.get("include"), list) else []
        tools, forced = chosen(fields, declared(fields, keys="", hosted=HOSTED), words=WORDS)
        asked = fields.get("reasoning")
        effort = asked.get("effort") if isinstance(asked, dict) else None
        store = fields.flag("store", absent=True)
        reasons, variables = reasoning_of(fields, effort, "reasoning.effort")
        return Request(
            fields.text("model"),
            answerable(messages, "input"),
            fields.count("max_output_tokens"),
            fields.real("temperature", 0.0, 2.0),
            fields.real("top_p", 0.0, 1.0),
            stream=fields.flag("stream"),
            tools=tools,
            previous=_previous(fields),
            parallel=fields.flag("parallel_tool_calls", absent=True),
            user=fields.named("safety_identifier", "user"),
            logprobs=_LOGPROBS in included,
            top_logprobs=top_of(fields, reported=_LOGPROBS in included),
            forced=forced,
            schema=_schema(fields),
            thoughts=_thoughts(fields),
            reasons=reasons,
            variables=variables,
            sealed_thoughts=_SEALED in included,
            store=store,
            input=input_of(fields) if store else b"",
            repeated=repeated_of(fields),
        )

    def whole(self, opening: Opening, request: Request, endings: list[Ending]) -> dict[str, Any]:
        return _response(opening, request, endings[0])

    def events(self, opening: Opening, request: Request, choice: int = 0) -> Events:
        return _ResponseEvents(opening, request)

    def error(self, error: LiveError, turn: str) -> tuple[int, dict[str, Any]]:
        return openai_error(error)


class _ResponseEvents:
    """See `Events`."""

    def __init__(self, opening: Opening, request: Request) -> None:
        self.response: dict[str, Any] | None = None
        self._opening = opening
        self._request = request
        self._thoughts: list[str] = []
        self._thinking = False  # the item of reasoning is open
        self._number = 0
        self._items = 0  # that have begun
        self._output: list[dict[str, Any]] = []  # items that are done
        self._place: dict[str, Any] = {}  # of the message that is open; empty: none is
        self._texts: list[str] = []  # of that
        self._messages = 0  # that have begun

    def begin(self) -> bytes:
        first = self._event("response.created", response=_response(self._opening, self._request))
        return first + self.alive()

    def text(self, delta: str) -> bytes:
        first = self._opened()
        self._texts.append(delta)
        return first + self._event("response.output_text.delta", **self._place, delta=delta, logprobs=[])

    def _opened(self) -> bytes:
        """Return the begin of a message, unless one is open."""
        if self._place:
            return b""
        before = self._thought()
        number, self._items = self._items, self._items + 1
        identity = _item_id(self._opening, self._messages)
        self._messages += 1
        self._place = {"item_id": identity, "output_index": number, "content_index": 0}
        item = _item_of(identity, "in_progress", [])
        first = before + self._event("response.output_item.added", output_index=number, item=item)
        return first + self._event("response.content_part.added", **self._place, part=_part(""))

    def _closed(self, status: str, ending: Ending | None = None) -> bytes:
        """Return the end of the open message, if any: clients keep items in the order of their ends."""
        if not self._place:
            return b""
        place, self._place = self._place, {}
        part = _part("".join(self._texts), ending)
        self._texts.clear()
        item = _item_of(place["item_id"], status, [part])
        self._output.append(item)
        return (
            self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"])
            + self._event("response.content_part.done", **place, part=part)
            + self._event("response.output_item.done", output_index=place["output_index"], item=item)
        )

    def call(self, call: Call) -> bytes:
        before = self._thought() + self._closed("completed")
        number, self._items = self._items, self._items + 1
        item = _called(call)
        place = {"item_id": item["id"], "output_index": number}
        begun = item | {"arguments": "", "status": "in_progress"}
        self._output.append(item)
        return (
            before
            + self._event("response.output_item.added", output_index=number, item=begun)
            + self._event("response.function_call_arguments.delta", **place, delta=call.text)
            + self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.text)
            + self._event("response.output_item.done", output_index=number, item=item)
        )

    def thought(self, delta: str) -> bytes:
        first = b""
        if not self._thinking:
            self._thinking, self._items = True, self._items + 1
            item = reasoning_item(self._opening, self._request, "", status="in_progress")
            first = self._event("response.output_item.added", output_index=0, item=item) + self._part("added", "")
        self._thoughts.append(delta)
        return first + self._reasoning("delta", delta=delta)

    def _thought(self) -> bytes:
        """Return the end of the reasoning, if it is open: it is the first item."""
        if not self._thinking:
            return b""
        self._thinking, text = False, "".join(self._thoughts)
        item = reasoning_item(self._opening, self._request, text)
        self._output.append(item)
        last = self._reasoning("done", text=text) + self._part("done", text)
        return last + self._event("response.output_item.done", output_index=0, item=item)

    @property
    def _reasoning_place(self) -> tuple[str, dict[str, Any]]:
        """Return the prefix of event names, and the index of the reasoning."""
        place = {"item_id": f"rs_{self._opening.turn}", "output_index": 0}
        if self._request.thoughts == "summary":
            return "reasoning_summary", place | {"summary_index": 0}
        return "reasoning", place | {"content_index": 0}

    def _reasoning(self, kind: str, **data: Any) -> bytes:
        name, place = self._reasoning_place
        return self._event(f"response.{name}_text.{kind}", **place, **data)

    def _part(self, kind: str, text: str) -> bytes:
        name, place = self._reasoning_place
        name = f"{name}_part" if name == "reasoning_summary" else "content_part"
        return self._event(f"response.{name}.{kind}", **place, part=reasoning_part(self._request, text))

    def alive(self) -> bytes:
        return self._event("response.in_progress", response=_response(self._opening, self._request))

    def end(self, ending: Ending) -> bytes:
        response = _response(self._opening, self._request, ending)
        last = b""
        if not (self._place or ending.calls):  # nothing of it was streamed
            last = self._opened()
            self._texts.append(ending.text)
        last += self._closed(response["status"], ending)
        messages = [item for item in self._output if item["type"] == "message"]
        if messages:  # a call may have closed it before its log-probs were known
            messages[-1]["content"][0]["logprobs"] = token_logprobs(ending)
        self.response = response | {"output": self._output}
        return last + self._event(f"response.{response['status']}", response=self.response)

    def done(self, endings: list[Ending]) -> bytes:
        return b""

    def fail(self, error: LiveError) -> bytes:
        words = {"code": "server_error", "message": str(error)}
        response = _response(self._opening, self._request) | {"status": "failed", "error": words}
        return self._event("response.failed", response=response)

    def _event(self, kind: str, /, **data: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **data}, kind)


def _schema(fields: Body) -> str:
    text = fields.get("text")
    if text is None:
        return ""
    if not isinstance(text, dict) or set(text) - {"format", "verbosity"}:
        raise refusal("text", f"is {shown(text)}; expected a format, a verbosity, or both")
    return schema_of(text.get("format"), "text.format")


def _thoughts(fields: Body) -> Literal["text", "summary"]:
    asked = fields.get("reasoning")
    return "summary" if isinstance(asked, dict) and (asked.get("summary") or asked.get("generate_summary")) else "text"


def _previous(fields: Body) -> str:
    given = fields.get("previous_response_id")
    if given is None:
        return ""
    if not isinstance(given, str) or not given.startswith(_ID):
        raise refusal("previous_response_id", f"is {shown(given)}; expected the id of a response")
    return given.removeprefix(_ID)


def _take(fields: Body, messages: list[Message], entry: Message, where: str) -> None:
    """Add an item of the input to messages; replies come back as the items that the API gave.

    Raises:
        LiveError: it is of another type, or malformed.
    """
    kind, parts = entry.get("type", "message"), ("input_text", "output_text")
    if kind == "function_call_output":
        messages.append(result_of(entry.get("call_id"), entry.get("output"), where, parts))
    elif kind == "function_call":
        call = call_of(fields, entry.get("name"), entry.get("call_id"), entry.get("arguments"), where)
        if not messages or messages[-1]["role"] != "assistant":
            messages.append(assistant_message("", []))
        messages[-1].setdefault("tool_calls", []).extend(assistant_message("", [call])["tool_calls"])
    elif kind == "message":
        message = message_of(entry, where, roles=OPENAI_ROLES, parts=parts)
        if message["role"] == "assistant":
            thought = messages.pop() if only_reasoning(messages) else {}
            named = entry.get("id")  # which of replies that read the same it was
            turn = (
                {"turn": named.removeprefix(_MESSAGE).partition("_")[0]}
                if isinstance(named, str) and named.startswith(_MESSAGE)
                else {}
            )
            message = turn | thought | message
            if messages and "tool_calls" in messages[-1]:
                # Text after a call, in the same reply: no result separates the two. There may be thousands.
                before = messages.pop()
                said = before["content"] if isinstance(before["content"], list) else [before["content"]]
                said.append(message["content"])
                message = message | before | {"content": said}
        messages.append(message)
    elif kind == "reasoning":
        take_reasoning(messages, entry, where)
    else:
        raise refusal(f"{where}.type", f"is {shown(kind)}; this gateway takes messages of text and calls of functions")


def _whole(message: Message) -> Message:
    """Return a message with its text, which has several parts if calls separate them."""
    return message if isinstance(message["content"], str) else message | {"content": "".join(message["content"])}


def _response(opening: Opening, request: Request, ending: Ending | None = None) -> dict[str, Any]:
    """The response, unfinished or at its end."""
    status, output, usage, details = "in_progress", [], None, None
    if ending is not None:
        status = "incomplete" if ending.finish == "length" else "completed"
        details = {"reason": "max_output_tokens"} if ending.finish == "length" else None
        message = _item_of(_item_id(opening), status, [_part(ending.text, ending)])
        text = [message] if ending.text or not ending.calls else []
        thought = [reasoning_item(opening, request, ending.thoughts)] if ending.thoughts else []
        output = [*thought, *text, *map(_called, ending.calls)]
        usage = {
            "input_tokens": opening.prompt_tokens,
            "input_tokens_details": {"cached_tokens": ending.cached},
            "output_tokens": ending.tokens,
            "output_tokens_details": {"reasoning_tokens": ending.thought_tokens},
            "total_tokens": opening.prompt_tokens + ending.tokens,
        }
    return {
        "id": f"{_ID}{opening.turn}",
        "object": "response",
        "created_at": opening.created,
        "status": status,
        "error": None,
        "incomplete_details": details,
        "model": opening.model,
        "output": output,
        "usage": usage,
        "store": request.store,
        **REPEATED,
        **request.repeated,
    }


def _called(call: Call) -> dict[str, Any]:
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.text,
    }


def _item_id(opening: Opening, number: int = 0) -> str:
    """Return the id of a message of a reply; a message after a call also has a number."""
    return f"{_MESSAGE}{opening.turn}" + (f"_{number}" if number else "")


def _item_of(identity: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": identity, "type": "message", "status": status, "role": "assistant", "content": content}


def _part(text: str, ending: Ending | None = None) -> dict[str, Any]:
    logprobs = [] if ending is None else token_logprobs(ending)
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def reasoning_item(opening: Opening, request: Request, text: str, *, status: str = "completed") -> dict[str, Any]:
    """Return the item.

    The value of `encrypted_content` is no content: it names the turn, from whose stored tokens the next request
    continues.
    """
    summary = request.thoughts == "summary"
    part = [reasoning_part(request, text)] if text else []
    item = {"id": f"rs_{opening.turn}", "type": "reasoning", "summary": part if summary else [], "status": status}
    item |= {} if summary else {"content": part}
    return item | ({"encrypted_content": opening.turn} if request.sealed_thoughts else {})


def reasoning_part(request: Request, text: str) -> dict[str, Any]:
    """Return the part of the item that has its text."""
    return {"type": "summary_text" if request.thoughts == "summary" else "reasoning_text", "text": text}


def take_reasoning(messages: list[Message], entry: Message, where: str) -> None:
    """Add a returned item: the next message joins it.

    Raises:
        LiveError: its content or its summary is no list.
    """
    given = {name: entry.get(name) or [] for name in ("content", "summary")}
    for name, found in given.items():
        if not isinstance(found, list):
            raise refusal(f"{where}.{name}", f"is {shown(found)}; expected a list of parts of text")
    parts = [part for found in given.values() for part in found if isinstance(part, dict)]
    texts = [text for part in parts if isinstance(text := part.get("text"), str)]
    sealed = entry.get("encrypted_content")
    message = assistant_message("", [], turn=sealed if isinstance(sealed, str) else "")
    messages.append(message | {"reasoning_content": "".join(texts)})


def only_reasoning(messages: list[Message]) -> bool:
    """Return whether the last message is reasoning, and its message has not come."""
    last = messages[-1] if messages else {}
    return "reasoning_content" in last and not last["content"] and "tool_calls" not in last
