"""The conditions of `asyncrl tap --where`, and whether message types can ever meet them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from asyncrl.errors import WrongUsage
from asyncrl.state.format_message import FormattedMessage


class Condition(NamedTuple):
    """A field or header has a value; text may hold `*`."""

    key: str
    value: str

    def holds(self, tapped: FormattedMessage) -> bool:
        """Return whether a message meets it, in a header of this name or the field at this path."""
        if self.key in tapped.headers and fnmatchcase(tapped.headers[self.key], self.value):
            return True
        found = tapped.message
        for name in self.key.split("."):
            found = found.get(name) if isinstance(found, dict) else getattr(found, name, None)
        return found is not None and self._equals(found)

    def _equals(self, found: Any) -> bool:
        if isinstance(found, bool):
            return str(found).lower() == self.value.lower()
        if isinstance(found, int | float):
            try:
                return float(self.value) == found
            except ValueError:
                return False
        return fnmatchcase(str(found), self.value)


def read_condition(word: str) -> Condition:
    """`KEY=VALUE`.

    Raises:
        WrongUsage: it is not of this form.
    """
    key, sign, value = word.partition("=")
    if not key or not sign:
        raise WrongUsage(f"--where {word!r}: expected KEY=VALUE, such as reason=reward")
    return Condition(key, value)


def types_at(kind: Any, path: Sequence[str]) -> list[Any]:
    """Return what may stand at a path of fields in values of a type; nothing where there is no such path."""
    if get_origin(kind) in (Union, UnionType):
        return [found for part in get_args(kind) if part is not NoneType for found in types_at(part, path)]
    if not path or kind is Any:
        return [kind]
    if get_origin(kind) is dict:
        return types_at(get_args(kind)[1], path[1:])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and path[0] in kind.__struct_fields__:
        return types_at(get_type_hints(kind)[path[0]], path[1:])
    return []


def may_be(kind: Any, value: str) -> bool:
    """Return whether a field of a type can have a value as it is given on the command line."""
    if kind is bool:
        return value.lower() in ("true", "false")
    if kind in (int, float):
        try:
            float(value)
        except ValueError:
            return False
    return get_origin(kind) is not Literal or any(fnmatchcase(str(option), value) for option in get_args(kind))


def described(kind: Any) -> str:
    """Describe a type."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    return "true or false" if kind is bool else "a number"
