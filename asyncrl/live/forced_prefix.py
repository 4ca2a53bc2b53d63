"""How a reply begins where its request forces a call of a tool, or a form: with tokens that are not sampled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from asyncrl.live.apis.schema import LiveError, Request
from asyncrl.live.reasoning_parser import CLOSED, unthought
from asyncrl.live.tools import Wording
from topics.wire import Int32Array


class Begun(NamedTuple):
    """Tokens that a reply begins with."""

    ids: Int32Array  # [B] after the prompt
    text: str = ""  # of the reply


def begin_reply(request: Request, wording: Wording, *, grammars: bool) -> Begun:
    """Return what the reply to a request begins with.

    Args:
        grammars: the engines can force a form, and penalise tokens.

    Raises:
        LiveError: the chat template or the engines cannot do it.
    """
    _check_supported(request, wording, grammars=grammars)
    if request.raw is not None:
        return Begun(np.empty(0, np.int32))
    if not request.schema and request.forced is None:
        thinks = wording.thinks is not None and not request.reasons
        return Begun(wording.tokenizer.encode(unthought(wording.tokenizer, request.variables) if thinks else ""))
    opened = wording.opened(request.variables)
    text = wording.beginning.of(request.forced) if wording.beginning and request.forced is not None else ""
    # Opened reasoning is closed: neither a call nor a format belongs inside reasoning.
    return Begun(wording.tokenizer.encode((CLOSED if opened else "") + text), text)


def _check_supported(request: Request, wording: Wording, *, grammars: bool) -> None:
    if request.tools and wording.form is None:
        words = "tools are not supported by the chat template of this model, or it writes calls in no known format"
        raise LiveError("invalid", words, field="tools")
    if request.forced is not None and wording.beginning is None:
        words = "tool_choice forces a call, and the chat template of this model names the tool after its arguments"
        raise LiveError("invalid", f"{words}: send auto", field="tool_choice")
    if request.schema and not grammars:
        words = "a form of the reply other than text is asked for, which the embedded engine of this run cannot force"
        raise LiveError("invalid", f"{words}: leave it out (response_format, text.format, output_config.format)")
    if request.penalised and not grammars:
        field = request.penalised
        raise LiveError(
            "invalid", f"{field} is not supported by the embedded engine of this run: leave it out", field=field
        )
    if request.schema and request.forced is not None:
        words = "tool_choice forces a call, and another field a form of the reply: send one of the two"
        raise LiveError("invalid", words, field="tool_choice")
