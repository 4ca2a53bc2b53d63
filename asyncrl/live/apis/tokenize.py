"""Tokens of a prompt, `/tokenize`, with the fields that vLLM and SGLang know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.live.apis.body import Body, answerable
from asyncrl.live.apis.chat import message_in
from asyncrl.live.apis.completions import prompt_of
from asyncrl.live.apis.openai import reasoning_of
from asyncrl.live.apis.schema import Request
from asyncrl.live.apis.tool_fields import declared

TOKENIZE_PATH = "/tokenize"
READ = ("model", "prompt", "messages", "tools", "chat_template_kwargs", "add_special_tokens", "return_token_strs")
_NEUTRAL: dict[str, tuple[Any, ...]] = {"add_generation_prompt": (True,), "continue_final_message": (False,)}


def parse_tokenize(body: bytes) -> Request:
    """Read the body of a request for the tokens of a prompt, or of messages as the next reply would follow them.

    Raises:
        LiveError: it is malformed; the message names the field.
    """
    fields = Body(body)
    fields.only(READ, (), _NEUTRAL)
    name, wanted = fields.named("model"), fields.flag("return_token_strs")
    if fields.get("messages") is None:
        special = fields.flag("add_special_tokens", absent=True)
        return Request(name, [], raw=prompt_of(fields), special=special, token_ids=wanted)
    messages = [message_in(fields, entry, f"messages[{n}]") for n, entry in enumerate(fields.entries("messages"))]
    _, variables = reasoning_of(fields, None, "")
    tools = declared(fields, keys="function")
    return Request(name, answerable(messages, "messages"), tools=tools, variables=variables, token_ids=wanted)


def tokens_body(ids: Sequence[int], most: int, text: Callable[[list[int]], str] | None) -> dict[str, Any]:
    """Return the answer to a client.

    Args:
        most: tokens that prompt and reply may have together.
        text: of tokens; None where their texts were not asked for.
    """
    texts = {} if text is None else {"token_strs": [text([one]) for one in ids]}
    return {"count": len(ids), "max_model_len": most, "tokens": [*ids], **texts}
