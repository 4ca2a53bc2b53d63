"""Renders chat templates as transformers does, without importing it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Variables: TypeAlias = Mapping[str, Any]  # of a template, such as `enable_thinking`
NO_VARIABLES: Variables = MappingProxyType({})
Span: TypeAlias = tuple[int, int]  # first character, and the one after the last

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning. Templates read the first, or `thinking`."""


class _Rendering(NamedTuple):
    """A text that is being rendered, and what its template marks."""

    blocks: list[str]
    marked: list[tuple[int, str]]  # first character, and the text

    def spans(self, text: str) -> list[Span]:
        """Return the marked spans of the whole text; none if a macro marked text, whose place is not known then."""
        known = all(text.startswith(said, start) for start, said in self.marked)
        return [(start, start + len(said)) for start, said in self.marked] if known else []


_rendering: ContextVar[_Rendering] = ContextVar("rendering")


class _Generation(Extension):
    """Notes the place of the text between `{% generation %}` and `{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        text, rendering = caller(), _rendering.get()
        rendering.marked.append((sum(map(len, rendering.blocks)), text))
        return text


class _Dict:
    """`dict` of templates, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` of templates, without names that have a meaning in Python (`__html__`)."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no names that begin with an underscore, found {name!r}; rename it")


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
        environment.globals["dict"] = _Dict()
        environment.globals["namespace"] = _Namespace
        self.source = source
        self._template = environment.from_string(source)
        self._values = values

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Any,
        add_generation_prompt: bool,
        variables: Variables = NO_VARIABLES,
    ) -> tuple[str, list[Span]]:
        """Write `messages` as one text.

        Args:
            variables: further variables of the template, such as `enable_thinking`.

        Returns:
            The text, and the spans of it that the template marks as the assistant's.
        """
        present = [_as_templates_read(message) for message in messages]
        own = {"messages": present, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        rendering = _Rendering([], [])
        token = _rendering.set(rendering)
        try:
            for block in self._template.generate({**variables, **self._values, **own}):
                rendering.blocks.append(block)
        finally:
            _rendering.reset(token)
        text = "".join(rendering.blocks)
        return text, rendering.spans(text)


def _as_templates_read(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as transformers gives it to templates."""
    # Templates know missing keys better than empty ones.
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[key] for key in REASONING if key in present), None)
    return present if reasoning is None else {"thinking": reasoning, **present, REASONING[0]: reasoning}


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Like jinja2's own, without its escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
