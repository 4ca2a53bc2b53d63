"""The token with which a chat template ends a reply.

Base models have chat templates whose turns end with a token that their other files do not name: no engine stops there
unless a request says so.
"""

from __future__ import annotations

from jinja2 import TemplateError
from tokenizers import Tokenizer

from asyncrl.data.messages import ASSISTANT
from asyncrl.data.templates import ChatTemplate

_REPLY = "A reply."
_TURNS = [{"role": "user", "content": "A question."}, {"role": ASSISTANT, "content": _REPLY}]


def find_turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the token that the template writes after a reply; None if it writes text, or refuses the question."""
    try:
        text, _ = template.render(_TURNS, tools=None, add_generation_prompt=False)
    except (TemplateError, TypeError, ValueError, LookupError):
        return None
    _, found, after = text.rpartition(_REPLY)
    added = [
        (len(token.content), number)
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if found and token.content.strip() and after.lstrip().startswith(token.content)
    ]
    return max(added)[1] if added else None
