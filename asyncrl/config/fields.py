"""Fields of settings and messages as their reference shows them. The comment at a field is its documentation."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import sys
import tokenize
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec


class FieldDoc(NamedTuple):
    """One field of a struct."""

    name: str
    type: Any
    written: str  # its type as the source has it
    default: Any  # a new value each time; msgspec.NODEFAULT for a required field
    about: str  # the comment lines above it, or else the comment on its line


def fields_of(kind: type[msgspec.Struct]) -> list[FieldDoc]:
    """Fields of a struct with those that it inherits."""
    found = []
    for field in msgspec.structs.fields(kind):
        owner = next(base for base in kind.__mro__ if field.name in vars(base).get("__annotations__", {}))
        written, about = _written(owner.__module__)[owner.__name__, field.name]
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        found.append(FieldDoc(field.name, field.type, written, default, about))
    return found


def about(kind: type[Any]) -> str:
    """Docstring of a type, in one paragraph."""
    return " ".join((kind.__doc__ or "").split())


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *escaped)]
    return [lines[0], "|" + "---|" * len(columns), *lines[1:]]


@functools.cache
def _written(module: str) -> dict[tuple[str, str], tuple[str, str]]:
    """(class, field) to the field's annotation and comment, for all classes of a module."""
    source = inspect.getsource(sys.modules[module])
    above, beside = dict[int, str](), dict[int, str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            stands_alone = token.line.lstrip().startswith("#")
            (above if stands_alone else beside)[token.start[0]] = token.string.lstrip("# ")
    found = {}
    for kind in [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]:
        for field in kind.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                first = field.lineno
                while first - 1 in above:
                    first -= 1
                comment = " ".join(above[line] for line in range(first, field.lineno))
                comment = comment or beside.get(field.end_lineno or field.lineno, "")
                found[kind.name, field.target.id] = (ast.unparse(field.annotation), comment)
    return found
