"""The core of a reply: the prompt of a request as tokens, and the reply that sampled tokens are.

Gateways and the endpoints of rollout functions share it. It knows neither who asks nor where anything is stored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import numpy as np

from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError, TooLong
from asyncrl.engine.answer import Likeliest
from asyncrl.live.apis.schema import TOO_LONG, Call, Ending, Events, LiveError, Piece, Request, Sampled, Thought
from asyncrl.live.conversation import Prompt
from asyncrl.live.forced_prefix import Begun
from asyncrl.live.reply_parser import ReplyParts
from topics.trajectories import Answer


class Bounds(NamedTuple):
    """Bounds of a prompt by the model."""

    begin: Callable[[Request], Begun]  # returns what the reply to a request begins with
    most: int = sys.maxsize  # tokens
    vocabulary: int = sys.maxsize  # token ids


@contextmanager
def refusing_prompts(most: int) -> Iterator[None]:
    """Refuse a request whose prompt cannot be written.

    Args:
        most: tokens of a prompt.

    Raises:
        LiveError: the template refuses the messages, or they have too many tokens.
    """
    try:
        yield
    except TooLong as error:
        raise _too_long(f"at least {error.least}", most) from error
    except TokenizerError as error:
        raise LiveError("invalid", str(error), field="messages") from error
    except RecursionError as error:
        raise LiveError("invalid", "the body is nested too deeply; send one that is flatter") from error


def completed_prompt(request: Request, prompt: Prompt, begun: Begun, bounds: Bounds) -> Prompt:
    """Add what the reply begins with to the prompt of a request.

    Raises:
        LiveError: it is empty, too long, or has token ids that the model does not know.
    """
    if begun.ids.size:
        prompt = prompt._replace(ids=np.concatenate([prompt.ids, begun.ids]), begun=begun.text)
    if not len(prompt.ids):
        raise LiveError("invalid", "the messages have no text; send some", field="messages")
    if len(prompt.ids) > bounds.most:
        raise _too_long(f"{len(prompt.ids)}", bounds.most)
    if isinstance(request.raw, list) and max(request.raw) >= bounds.vocabulary:
        words = f"has the token id {max(request.raw)}; the vocabulary has {bounds.vocabulary}"
        raise LiveError("invalid", f"prompt {words}", field="prompt")
    return prompt


def _too_long(tokens: str, most: int) -> LiveError:
    words = f"prompt is too long: {tokens} tokens; the model takes 1 to {most}: send fewer messages"
    return LiveError("invalid", words, field="messages", code=TOO_LONG)


def finish_of(answer: Answer) -> Literal["stop", "length"]:
    """Return how a whole answer ended."""
    return "length" if answer.finish == "length" else "stop"


def ending_of(
    request: Request,
    answer: Answer,
    parts: ReplyParts,
    tokenizer: TaskTokenizer,
    *,
    likeliest: Sequence[Likeliest] = (),
    cached: int = 0,
) -> Ending:
    """Return the end of a reply.

    Args:
        parts: of all its tokens.
        likeliest: tokens at the first positions of the answer.
        cached: tokens of the prompt that the engine had.
    """
    tokens, thinks = answer.tokens, bool(request.thoughts)
    return Ending(
        parts.text,
        len(tokens),
        finish_of(answer),
        parts.stop,
        parts.calls,
        _sampled_tokens(answer, tokenizer, likeliest) if request.logprobs else None,
        thoughts=parts.thoughts if thinks else "",
        thought_tokens=parts.thought_tokens(tokens) if thinks else 0,
        cached=max(0, cached),
        versions=(int(min(answer.versions)), int(max(answer.versions))) if len(tokens) else None,
        ids=tokens.tolist() if request.token_ids else None,
    )


def _sampled_tokens(answer: Answer, tokenizer: TaskTokenizer, likeliest: Sequence[Likeliest]) -> list[Sampled]:
    """The tokens of the reply without its end, with their log-probs, and the likeliest tokens if known."""
    ends, text = tokenizer.eos_ids, tokenizer.decode_all
    likeliest = [*likeliest, *[[]] * (len(answer.tokens) - len(likeliest))]
    known = zip(answer.tokens.tolist(), answer.logprobs.tolist(), likeliest, strict=True)
    return [
        Sampled(text([token]), value, [(text([one]), other) for one, other in top])
        for token, value, top in known
        if token not in ends
    ]


def event_of(events: Events, piece: Piece) -> bytes:
    """Return the events of one piece of a streamed reply; "" keeps the client waiting."""
    if isinstance(piece, Call):
        return events.call(piece)
    if isinstance(piece, Thought):
        return events.thought(piece.text)
    return events.text(piece) if piece else events.alive()
