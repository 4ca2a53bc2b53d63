"""Choice of the writer of the text after a reply: the chat template by difference, or a program of `renderers`."""

from __future__ import annotations

from importlib.util import find_spec

from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.live.difference import TurnBoundary

AUTO, DIFFERENCE = "auto", TurnBoundary.name
_MARKS = (  # tokens of which every family that the package knows has one: without any it is not loaded
    "<tool_response>",
    "[gMASK]",
    "]~!b[",
    "<｜begin▁of▁sentence｜>",
    "<|im_user|>",
    "<|begin_of_text|>",
    "<|turn>",
    "〈|EOS|〉",
    "<|message_user|>",
    "<｜hy_begin_of_sentence:opensource｜>",
)


def open_boundary(tokenizer: TaskTokenizer, wanted: str, *, most: int | None = None) -> TurnBoundary:
    """Choose the writer of the text after replies of a model.

    Args:
        wanted: as `gateway.renderer`: `auto`, `difference`, or a family of `renderers`.
        most: tokens of a prompt; None: any.

    Raises:
        TokenizerError: there is no chat template, or it is unsafe; or the family is not to be had, or another one's.
    """
    if not tokenizer.has_template:
        raise TokenizerError(
            f"a gateway serves chats, and {tokenizer.name} has no chat template; "
            "put chat_template.jinja into the model directory"
        )
    if wanted == DIFFERENCE:
        return TurnBoundary(tokenizer, "gateway.renderer asks for it", most=most)
    if find_spec("renderers") is None:
        if wanted != AUTO:
            raise TokenizerError(
                f"gateway.renderer is {wanted!r}, and the package renderers is not installed; "
                'pip install "asyncrl[renderers]", or set "auto"'
            )
        return TurnBoundary(tokenizer, "the package renderers is not installed", most=most)
    if wanted == AUTO and not set(_MARKS) & set(tokenizer.special):
        return TurnBoundary(tokenizer, "the package renderers knows no family with these tokens", most=most)
    from asyncrl.live.rendered import open_rendered  # takes 65 MB and a second or two

    reason = "the chat template is that of no family that the package renderers knows"
    return open_rendered(tokenizer, wanted, most=most) or TurnBoundary(tokenizer, reason, most=most)
