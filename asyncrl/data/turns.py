"""Supervised text of a conversation: its trained messages, and their places in the text.

A message is trained in the form that it has while it is the last one, after its predecessors of that moment: so the
policy would be prompted for it. Templates may write earlier messages otherwise once others follow, as Qwen3's leaves
out reasoning: then one conversation has several texts, and each trained message belongs to one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from asyncrl.data.messages import ASSISTANT, TRAIN
from asyncrl.data.templates import REASONING, Span
from asyncrl.errors import AsyncRLError

Render: TypeAlias = Callable[[list[dict[str, Any]], bool], tuple[str, list[Span]]]
"""A template: messages, and whether an answer shall follow, to text and the spans that it marks as the assistant's."""


class TurnError(AsyncRLError):
    """A conversation that cannot be trained on under this template."""


class Turns(NamedTuple):
    """The messages of a conversation that are trained, unless `"train"` of a message says otherwise."""

    roles: tuple[str, ...] = (ASSISTANT,)
    last: bool = False  # of these the last one alone


class Text(NamedTuple):
    """A text of a conversation, and the spans of it that are trained."""

    text: str
    spans: list[Span]


def texts_of(messages: list[dict[str, Any]], turns: Turns, render: Render, ends: Sequence[str]) -> list[Text]:
    """The texts that contain each trained message of a conversation once.

    Args:
        ends: end-of-sequence tokens: the last of them in a message is the last token of it that is trained.

    Raises:
        TurnError: nothing is trained; or what the template writes for a message is ambiguous.
    """
    chosen = _chosen(messages, turns)
    if not chosen:
        found = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise TurnError(
            f"no message is trained: there are {found}, of which {', '.join(turns.roles)} are, unless "
            f'"{TRAIN}" of a message says otherwise; remove the row'
        )
    left, found_texts = [_written(messages, number, render, ends) for number in chosen], []
    while left:
        text = left[-1].text
        spans = [span for one in left if text.startswith(one.text) for span in one.spans]
        found_texts.append(Text(text, spans))
        left = [one for one in left if not text.startswith(one.text)]
    return found_texts[::-1]


def _chosen(messages: list[dict[str, Any]], turns: Turns) -> list[int]:
    chosen = [
        number
        for number, message in enumerate(messages)
        if (message["role"] in turns.roles if message.get(TRAIN) is None else message[TRAIN])
    ]
    return chosen[-1:] if turns.last else chosen


def _written(messages: list[dict[str, Any]], number: int, render: Render, ends: Sequence[str]) -> Text:
    """A message after its predecessors: the span that the template marks, or else the text that it adds."""
    message, earlier = messages[number], messages[:number]
    answers = message["role"] == ASSISTANT
    text, marked = render(messages[: number + 1], False)
    spans = marked[len(render(earlier, False)[1]) if marked and earlier else 0 :] if answers else []
    if not spans:
        before = render(earlier, answers)[0] if earlier or answers else ""
        if not text.startswith(before):
            raise TurnError(
                f"the chat template rewrites the text before message {number} differently once it is there; mark the "
                "assistant's text with {% generation %} in the template"
            )
        reply = text[len(before) :]
        cut = max((reply.rfind(end) + len(end) for end in ends if end in reply), default=len(reply))
        spans = [(len(before), len(before) + cut)]
    for key in REASONING:
        reasoning = message.get(key)
        if isinstance(reasoning, str) and not any(reasoning.strip() in text[first:last] for first, last in spans):
            raise TurnError(
                f"the chat template does not write {key!r} of message {number}; remove it, or put it where "
                "the template writes it"
            )
    return Text(text, spans)
