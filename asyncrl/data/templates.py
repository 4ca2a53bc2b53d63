"""Renders chat templates as transformers does, without importing it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeAlias

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Span: TypeAlias = tuple[int, int]  # first character, and the one after the last

# Unicode keeps these two from ever standing for a character, so no text has them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


class _Generation(Extension):
    """Marks what stands between `{% generation %}` and `{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class ChatTemplate:
    """A chat template, in a sandbox: templates come with downloaded models.

    Source: `apply_chat_template` of transformers 5 (same options, filters and globals).
    """

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.source = source
        self._template = environment.from_string(source)
        self._values = values

    def render(
        self, messages: list[dict[str, Any]], *, tools: Any, add_generation_prompt: bool
    ) -> tuple[str, list[Span]]:
        """Write `messages` as one text.

        Returns:
            The text, and the spans of it that the template marks as the assistant's.
        """
        # As transformers does: templates know missing keys better than empty ones.
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        marked = self._template.render(
            messages=present, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **self._values
        )
        text, spans = [], list[Span]()
        length = 0
        for number, piece in enumerate(re.split(f"[{_OPEN}{_CLOSE}]", marked)):
            if number % 2:
                spans.append((length, length + len(piece)))
            text.append(piece)
            length += len(piece)
        return "".join(text), spans


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Like jinja2's own, without its escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
