"""What follows a reply, written by the package `renderers`, which has the templates of some families as programs.

A program is told the tokens of prompt and reply, so it knows how a reply ended: it closes reasoning that was cut by
length. Fine-tunes have their own names and templates, so a program is chosen not by name but if both write some
conversations equally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from renderers import config_from_name, create_renderer
from renderers.base import MODEL_RENDERER_MAP, Renderer

from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.live.difference import History, Message, TurnBoundary
from asyncrl.live.escape_special_tokens import Quoted
from topics.wire import Int32Array

_ELSEWHERE = "gpt-oss"  # gets its vocabulary from a server, and the template is unsafe by difference
_FAMILIES = sorted({*MODEL_RENDERER_MAP.values()} - {_ELSEWHERE})
_SHOWN = 256  # tokens of a prompt: its end says whether the reply began in reasoning, and more would take longer
_FAULTS = (ValueError, TypeError, LookupError, AssertionError, NotImplementedError)  # of what a program does not know

_TOOL = {"type": "function", "function": {"name": "find", "description": "b", "parameters": {"type": "object"}}}
_CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": {"a": "b"}}}
_QUESTION, _REPLY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_FOUND = {"role": "tool", "content": "d", "tool_call_id": "c"}
_PROBES: tuple[tuple[list[Message], list[Message]], ...] = (  # conversations, with their tools
    ([_QUESTION], []),
    ([{"role": "system", "content": "a"}, _QUESTION, _REPLY, _QUESTION], []),
    ([_QUESTION, _REPLY | {"reasoning_content": "c"}, _QUESTION], []),
    ([_QUESTION, _CALLED, _FOUND, _FOUND], [_TOOL]),
    ([_QUESTION, _REPLY, _QUESTION, _CALLED | {"content": "b", "reasoning_content": "c"}, _FOUND], [_TOOL]),
)


class _Tokens:
    """A tokenizer as renderers ask for one; unlike that of transformers it has no state that encoding changes.

    `asyncrl/live/escape_special_tokens.py` marks cuts in the texts of clients. Each piece between two cuts is encoded
    separately, so client text never becomes a control token.
    """

    name_or_path = ""
    unk_token_id = None

    def __init__(self, tokenizer: TaskTokenizer, quoted: Quoted) -> None:
        self.eos_token_id = tokenizer.eos_ids[0]
        self._tokenizer, self._quoted = tokenizer, quoted
        self._special = {text: int(tokenizer.encode(text)[0]) for text in tokenizer.special}

    def encode(self, text: str, **_options: Any) -> list[int]:
        """Return the tokens of text, none added around it."""
        ids: list[int] = self._quoted.encode(text).tolist()
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **_options: Any) -> str:
        """Return the text of tokens."""
        return self._tokenizer.decode(list(ids)) if skip_special_tokens else self._tokenizer.decode_all(list(ids))

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token of the format; None if it does not exist."""
        return self._special.get(token)


class RenderedSeam(TurnBoundary):
    """Writes the text after a reply with a family's program; by difference if the program declines."""

    def __init__(self, tokenizer: TaskTokenizer, family: str, *, most: int | None = None) -> None:
        """
        Raises:
            TokenizerError: the family is unknown, or not that of the chat template; or as of `TurnBoundary`.
        """
        super().__init__(tokenizer, "it writes as the chat template does", most=most)
        self.name = family
        try:
            # The history keeps its sampled tokens, even reasoning that the template would leave out.
            config = type(config_from_name(family))(thinking_retention="all")
            self._renderer: Renderer = create_renderer(_Tokens(tokenizer, self._quoted), config)
            unlike = next((number for number, probe in enumerate(_PROBES) if not self._proved(*probe)), None)
        except _FAULTS as error:
            raise TokenizerError(f"the renderer {family!r} does not take this model: {error}") from error
        if unlike is not None:
            raise TokenizerError(
                f"the renderer {family!r} writes conversation {unlike} of asyncrl/live/rendered.py in another way than "
                "the chat template of this model; name the family of the template"
            )

    def after(self, history: History, messages: Sequence[Message], variables: Mapping[str, Any] = {}) -> Int32Array:
        if variables:  # a program does not know them
            return super().after(history, messages, variables)
        begin = max(0, history.prompt - _SHOWN)
        shown = history.ids[begin:].tolist()
        prompt, reply = shown[: history.prompt - begin], shown[history.prompt - begin :]
        try:
            found = self._renderer.bridge_to_next_turn(prompt, reply, self._quoted.messages(messages))
        except _FAULTS:
            found = None
        if found is None or found.token_ids[: len(shown)] != shown:
            return super().after(history, messages)
        return np.concatenate([history.ids, np.array(found.token_ids[len(shown) :], np.int32)])

    def _proved(self, messages: list[Message], tools: list[Message]) -> bool:
        """Return whether the program writes a conversation as the template does, which may refuse it."""
        try:
            written = self.whole(messages, tools)
        except TokenizerError:
            return True
        found = self._renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True)
        return bool(found == written.tolist())


def open_rendered(tokenizer: TaskTokenizer, wanted: str, *, most: int | None) -> RenderedSeam | None:
    """Return the writer of the text after replies of a model; None if `wanted` is no family, and no program matches the
    template.

    Raises:
        TokenizerError: see `RenderedSeam`.
    """
    if wanted != "auto":
        return RenderedSeam(tokenizer, wanted, most=most)
    for family in _FAMILIES:
        try:
            return RenderedSeam(tokenizer, family, most=most)
        except TokenizerError:
            continue
    return None
