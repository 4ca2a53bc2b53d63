"""Calls of tools: how a chat template writes them, and the calls in a reply while its text comes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.live.apis.schema import Call, assistant_message
from asyncrl.live.reasoning_parser import begun, opened_by

_QUESTION = {"role": "user", "content": "a"}
_TOOL = {"type": "function", "function": {"name": "find", "description": "", "parameters": {"type": "object"}}}


class ToolFormat(NamedTuple):
    """Form in which the templates of a family write a call."""

    opener: str
    closer: str  # "": the end of the reply
    fields: tuple[str, str]  # names of the tool's name and its arguments in the JSON object between the two
    first: bool = False  # a call is the whole reply, and its opener belongs to it


FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", ("name", "arguments")),
    "llama3": ToolFormat('{"name"', "", ("name", "parameters"), first=True),
}
"""Formats by the family that began with them; Qwen 2.5 and 3 write calls as Hermes does."""


class Beginning(NamedTuple):
    """Text that the calls of a template begin with."""

    name: str  # up to where the name of the tool is
    arguments: str  # text between the name and the arguments

    def of(self, tool: str) -> str:
        """Return the beginning of a call of a tool; of any tool for ""."""
        return self.name + (tool and msgspec.json.encode(tool).decode()[1:-1] + self.arguments)


class Wording(NamedTuple):
    """Tokens of a model, and how it writes calls of tools and reasoning."""

    tokenizer: TaskTokenizer
    form: ToolFormat | None  # of calls; None: it writes none
    beginning: Beginning | None  # of calls; None: the template writes another order
    thinks: bool | None  # whether the template opens the reasoning; None: there is none

    @classmethod
    def of(cls, tokenizer: TaskTokenizer) -> Wording:
        """Find how the chat template of a model writes."""
        form = format_of(tokenizer)
        return cls(tokenizer, form, _beginning_of(tokenizer, form), opened_by(tokenizer))

    def opened(self, variables: Mapping[str, Any]) -> bool | None:
        """Return `thinks` with these variables of the template."""
        return opened_by(self.tokenizer, variables) if variables and self.thinks is not None else self.thinks


def _written(tokenizer: TaskTokenizer) -> str:
    """Return a conversation with a call; "" where the template writes none."""
    call = assistant_message("", [Call("call_1", "find", {"a": "b"})])
    try:
        return tokenizer.chat_text(
            [_QUESTION, call, {"role": "tool", "content": "c", "tool_call_id": "call_1"}], [_TOOL]
        )
    except TokenizerError:
        return ""


def _beginning_of(tokenizer: TaskTokenizer, form: ToolFormat | None) -> Beginning | None:
    """Return the text before the name and the arguments of a call; None for another order."""
    if form is None:
        return None
    # The first opener may be in the template's description of tools.
    *_, call = _written(tokenizer).split(form.opener)
    before, found, behind = call.partition('"find"')
    between, colon, _ = behind.partition(f'"{form.fields[1]}":')
    if not (found and colon) or before.strip('{"name: \n') or between.strip(", \n"):
        return None
    return Beginning(form.opener + before + '"', f'"{between}{colon}')


def format_of(tokenizer: TaskTokenizer) -> ToolFormat | None:
    """Return how a model's chat template writes tool calls; None if it does not, or in another way."""
    text = _written(tokenizer)
    for form in FORMATS.values():
        after = text.partition(form.opener)[2]
        if after and (not form.closer or form.closer in after) and f'"{form.fields[1]}"' in after:
            return form
    return None


class CallText:
    """Tells calls of tools from the text of a reply; what may begin a call waits for what follows."""

    def __init__(self, form: ToolFormat | None, turn: str) -> None:
        self.text = ""  # all of it so far, without calls
        self.calls: list[Call] = []
        self.invalid = 0  # texts between the tags of a call that are none
        self._form = form  # None where the request has no tools: all is text
        self._turn = turn  # its id, which ids of calls are made of
        self._waiting = ""
        self._inside = False

    def add(self, text: str) -> list[str | Call]:
        """Return the new text and calls that are final."""
        if (form := self._form) is None:
            return self._shown(text)
        self._waiting += text
        found: list[str | Call] = []
        while True:
            if not self._inside:
                place = self._waiting.find(form.opener)
                if place < 0 or (form.first and (self.text or self._waiting[:place].strip())):
                    break
                found += self._shown(self._waiting[:place].rstrip())
                self._waiting, self._inside = self._waiting[place:], True
            place = self._waiting.find(form.closer) if form.closer else -1
            if place < 0:
                return found
            end = place + len(form.closer)
            found += self._called(self._waiting[:end])
            self._waiting, self._inside = self._waiting[end:], False
        ready = len(self._waiting) - self._held(form.opener)
        text, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return found + self._shown(text)

    def end(self) -> list[str | Call]:
        """Return what waited for more: a call that is not closed is text, unless its format closes none."""
        rest, self._waiting = self._waiting, ""
        if self._inside and self._form is not None and not self._form.closer:
            return self._called(rest)
        return [] if self.calls and not rest.strip() else self._shown(rest)

    def _held(self, opener: str) -> int:
        """Return how many final characters may belong to a call or begin one."""
        before = self._waiting[: len(self._waiting) - begun(self._waiting, opener)]
        return len(self._waiting) - len(before.rstrip())

    def _called(self, raw: str) -> list[str | Call]:
        """Return the call in a text; the text itself if it has no call."""
        form = self._form
        assert form is not None
        body = raw if form.first else raw[len(form.opener) : len(raw) - len(form.closer)]
        try:
            given = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            self.invalid += 1
            return self._shown(raw)
        if isinstance(given, dict):
            name, arguments = (given.get(field) for field in form.fields)
            if isinstance(name, str) and name and isinstance(arguments, dict):
                call = Call(f"call_{self._turn}_{len(self.calls)}", name, arguments)
                self.calls.append(call)
                return [call]
        self.invalid += 1
        return self._shown(raw)

    def _shown(self, text: str) -> list[str | Call]:
        self.text += text
        return [text] if text else []
