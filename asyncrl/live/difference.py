"""The text that follows a reply, written by the chat template and found by difference.

A mark stands for the reply, and the text that the template writes after the mark is encoded. That is exact if the text
begins with an end-of-sequence token, because no token reaches over a special one. A template that writes anything else
there is refused at the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.live.escape_special_tokens import Quoted
from topics.prompts import PromptRow
from topics.wire import Int32Array

Message = dict[str, Any]

_MARK = "\ufdd2"  # in the place of a reply; Unicode keeps it from ever standing for a character
_QUESTION = {"role": "user", "content": "a"}
_REPLY = {"role": "assistant", "content": _MARK}
_ROLES = ("user", "tool", "system")  # whose messages may follow a reply
_PROBES = (  # histories before a reply, which what follows it may not depend on
    [_QUESTION],
    [{"role": "system", "content": "a"}, _QUESTION],
    [_QUESTION, {"role": "assistant", "content": "a"}, _QUESTION],
)


class History(NamedTuple):
    """Tokens of a conversation up to the end of a reply."""

    turn: str  # of that reply
    ids: Int32Array  # [T] prompt and reply
    prompt: int  # how many of them are the prompt's
    session: str = ""  # of that turn
    tools: str = ""  # digest of those that its prompt declares; "": not known
    before: bytes = b""  # digest of the messages before the reply, as `Prompt.key`; b"": not known
    owner: str = ""  # who may go on with it


class TurnBoundary:
    """Writes what follows a reply, by difference."""

    name = "difference"

    def __init__(self, tokenizer: TaskTokenizer, reason: str = "", *, most: int | None = None) -> None:
        """
        Args:
            reason: for which it was chosen.
            most: tokens of a prompt; None: any.

        Raises:
            TokenizerError: the text after a reply is ambiguous, or need not begin with a token.
        """
        self.reason = reason
        self._tokenizer = tokenizer
        self._quoted = Quoted(tokenizer, most=most)
        self._ends = {end: tokenizer.decode_all([end]) for end in tokenizer.eos_ids}
        self._base = next((base for base in _PROBES if self._takes(base)), _PROBES[0])
        text = self._suffix(self._base, [_QUESTION])
        if not any(text.startswith(end) for end in self._ends.values()):
            raise TokenizerError(
                f"the chat template writes {text[:40]!r} after a reply; expected an end-of-sequence token first "
                f"({', '.join(self._ends.values()) or 'the model names none'}), or tokens could reach over the seam: "
                "end the assistant's text with eos_token in the template"
            )
        for base in _PROBES:
            if self._takes(base) and self._suffix(base, [_QUESTION]) != text:
                raise TokenizerError(
                    "the chat template writes what follows a reply differently when more precedes it; "
                    "a conversation cannot be continued from its tokens: use another template"
                )
        firsts = {self._first(text) for role in _ROLES if (text := self._follows(role))}
        self._openers = firsts if len(firsts) > 1 else set[str]()  # ends that begin the message of one role (GLM)

    def whole(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), variables: Mapping[str, Any] = {}
    ) -> Int32Array:
        """Return the tokens of a conversation of which nothing is known: [P] int32; raises `TooLong` as `after`."""
        quoted = self._quoted
        said, declared, given = quoted.messages(messages), quoted.tools(tools), quoted.variables(variables)
        return quoted.encode(self._tokenizer.chat_text(said, declared, given))

    def raw(self, prompt: str | list[int], *, special: bool) -> Int32Array:
        """Return the tokens of a prompt that no template writes: [P] int32.

        Args:
            prompt: text, in which tokens of the format count as such; or token ids.
            special: the tokenizer puts its own tokens around a text.

        Raises:
            TooLong: a text has certainly more tokens than a prompt may have.
        """
        if isinstance(prompt, str):
            self._quoted.check([prompt])
            tokenizer = self._tokenizer
            return tokenizer.encode_prompt(PromptRow(prompt), max_tokens=None) if special else tokenizer.encode(prompt)
        return np.array(prompt, np.int32)

    def text(self, ids: Int32Array) -> str:
        """Return the text of tokens, special tokens left out."""
        return self._tokenizer.decode(ids)

    def changes_history(self, variables: Mapping[str, Any]) -> bool:
        """Return whether the template writes the text before a reply differently with these variables."""
        return self._split(self._base, [_QUESTION], variables)[0] != self._split(self._base, [_QUESTION])[0]

    def after(self, history: History, messages: Sequence[Message], variables: Mapping[str, Any] = {}) -> Int32Array:
        """Return the tokens of a prompt: those of a history, and of the messages that follow its last reply.

        Args:
            history: a reply that did not end by itself (its limit, a stop sequence) is closed here.
            messages: at least one.
            variables: of the template.

        Raises:
            TooLong: they have certainly more tokens than a prompt may have.
        """
        text, ids = self._suffix(self._base, messages, variables), history.ids
        ended, written = self._ends.get(int(ids[-1]), ""), self._first(text)
        # The end that was sampled may be another than the template writes.
        if ended and (ended == written or written not in self._openers):
            text = text[len(written) :]
        return np.concatenate([ids, self._quoted.encode(text)])

    def _suffix(self, base: Sequence[Message], messages: Sequence[Message], variables: Mapping[str, Any] = {}) -> str:
        """Return the text from the end of a reply on, up to where the next one begins."""
        return self._split(base, messages, variables)[1]

    def _split(
        self, base: Sequence[Message], messages: Sequence[Message], variables: Mapping[str, Any] = {}
    ) -> tuple[str, str]:
        """Return the text before a reply, and the text from its end on, up to where the next one begins."""
        said, given = self._quoted.messages(messages), self._quoted.variables(variables)
        text = self._tokenizer.chat_text([*base, _REPLY, *said], variables=given)
        before, found, after = text.partition(_MARK)
        if not found or _MARK in after:
            raise TokenizerError(
                f"the chat template writes a reply {text.count(_MARK)} times, expected once: {before[-40:]!r}"
            )
        return before, after

    def _first(self, text: str) -> str:
        """Return the end of sequence that a text begins with; "" if it begins with no such token."""
        return next((end for end in self._ends.values() if text.startswith(end)), "")

    def _follows(self, role: str) -> str:
        """Return the text after a reply that a message of a role follows; "" if the template refuses it."""
        try:
            return self._suffix(self._base, [{"role": role, "content": "a", "tool_call_id": "a"}])
        except TokenizerError:
            return ""

    def _takes(self, base: Sequence[Message]) -> bool:
        """Return whether the template takes such a history: some refuse a system message."""
        try:
            self._suffix(base, [_QUESTION])
        except TokenizerError:
            return False
        return True
