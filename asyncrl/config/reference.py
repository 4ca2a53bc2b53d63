"""The reference of all settings, from the settings tree: types, ranges, units, defaults and the sentence at each."""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import msgspec
from msgspec import inspect as types

from asyncrl.algorithms.filters import Filter
from asyncrl.algorithms.losses import LOSSES
from asyncrl.config import settings
from asyncrl.config.fields import about, fields_of, markdown_table
from asyncrl.config.harness_settings import HarnessSettings
from asyncrl.config.setting_types import BENCHMARKS, Settings
from asyncrl.config.tool_settings import ToolSettings
from asyncrl.sinks.sink import SinkSettings

UNITS = {
    "_s": "s",
    "_mb": "MB",
    "_tokens": "tokens",
    "_steps": "steps",
    "_rows": "rows",
    "_groups": "groups",
    "_lag": "versions",
}
INTRODUCTION = """\
# Settings

A config is a TOML file; every key left out has the default below, and a wrong one stops the run before it starts.
`asyncrl check config.toml` names all wrong settings at once; `--set learner.lr=1e-5` overrides one on the command line.
A relative path in a config starts from the config's own folder, in a shipped one from `asyncrl/examples`; a path given
by `--set`, and `directory` anywhere, from the folder the command runs in. `~` is your home directory.
This page is printed by `asyncrl settings --markdown`.
"""


class SettingDoc(msgspec.Struct, frozen=True):
    """One setting, for readers."""

    key: str
    type: str
    range: str
    default: Any
    unit: str
    doc: str

    @property
    def expected(self) -> str:
        """Type and range, such as `integer >= 1`."""
        return f"{self.type} {self.range}".strip()


class TableDoc(msgspec.Struct, frozen=True):
    """One table of a config with its settings; the key of the topmost is empty."""

    key: str
    doc: str
    settings: list[SettingDoc]
    several: bool = False  # whether a config may have it several times, as `[[KEY]]`

    @property
    def header(self) -> str:
        """The table as a config has it; empty for the topmost."""
        return self.key and (f"[[{self.key}]]" if self.several else f"[{self.key}]")


def toml_text(value: Any) -> str:
    """Return how a value is written in a config, so far as JSON and TOML agree."""
    return "" if value is None else json.dumps(value, default=str, ensure_ascii=False)


_PLAIN_TYPES: dict[type[types.Type], str] = {
    types.BoolType: "boolean",
    types.IntType: "integer",
    types.FloatType: "number",
    types.StrType: "string",
}


def type_text(kind: types.Type) -> str:
    """Name of a setting's type, without its range."""
    if name := _PLAIN_TYPES.get(type(kind)):
        return name
    match kind:
        case types.LiteralType():
            return "one of " + ", ".join(toml_text(value) for value in kind.values)
        case types.Metadata(extra={"names": of_names}):
            return "one of " + ", ".join(toml_text(value) for value in of_names)
        case types.ListType(item_type=types.LiteralType() | types.Metadata()):
            least = f" of {kind.min_length} or more" if kind.min_length else ""
            return f"array{least}, each {type_text(kind.item_type)}"
        case types.ListType():
            least = f"{kind.min_length} or more " if kind.min_length else ""
            return f"array of {least}{type_text(kind.item_type)}s"
        case types.TupleType():
            return f"array of {len(kind.item_types)} {type_text(kind.item_types[0])}s"
        case types.DictType():
            return _table_text(kind)
        case types.UnionType():
            return type_text(_given(kind))
    raise TypeError(f"settings have no name for the type {kind}; add it to type_text in asyncrl/config/reference.py")


def _table_text(kind: types.DictType) -> str:
    """Name of the type of a table whose keys are the user's; numbers in it with their range."""
    of = kind.value_type
    if isinstance(of, types.DictType):
        return f"table of {_table_text(of).replace('table', 'tables', 1)}"
    return f"table of {type_text(of)}s {range_text(of)}" if isinstance(of, types.IntType | types.FloatType) else "table"


def _given(kind: types.UnionType) -> types.Type:
    """Type of a setting that may be left out."""
    return next(one for one in kind.types if not isinstance(one, types.NoneType))


def range_text(kind: types.Type) -> str:
    """Range of a setting's type, such as `>= 1`; empty for any value."""
    if isinstance(kind, types.UnionType):
        return range_text(_given(kind))
    if isinstance(kind, types.TupleType | types.ListType):
        bounds = range_text(kind.item_types[0] if isinstance(kind, types.TupleType) else kind.item_type)
        return f"each {bounds}" if bounds else ""
    if isinstance(kind, types.StrType) and kind.pattern is not None:
        return f"matching {kind.pattern}"
    if not isinstance(kind, types.IntType | types.FloatType):
        return ""
    bounds_of = {">": kind.gt, ">=": kind.ge, "<": kind.lt, "<=": kind.le}
    return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds_of.items() if bound is not None)


def expected_text(annotation: Any) -> str:
    """Return type and range of an annotated type, as error messages show them."""
    kind = types.type_info(annotation)
    return f"{type_text(kind)} {range_text(kind)}".strip()


def join_key(*parts: str) -> str:
    """Dotted key of nested tables; empty parts are left out."""
    return ".".join(part for part in parts if part)


def is_table(annotation: Any) -> bool:
    """Return whether a field is itself a table of settings."""
    return isinstance(annotation, type) and issubclass(annotation, Settings | Filter)


def named_tables(annotation: Any) -> type[Settings] | None:
    """Type of the tables that a field holds by names of the user's; None for any other field."""
    kinds = get_args(annotation)[1:] if get_origin(annotation) is dict else ()
    return next((kind for kind in kinds if is_table(kind)), None)


def kinds_of(annotation: Any) -> dict[str, type[msgspec.Struct]]:
    """Types of the tables that a field holds in an array or by names, by their `kind`; empty for any other field."""
    kinds = get_args(get_args(annotation)[-1]) if get_origin(annotation) in (list, dict) else ()
    tagged = [
        kind
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, SinkSettings | HarnessSettings | ToolSettings)
    ]
    return {str(kind.__struct_config__.tag): kind for kind in tagged}


def listed_table(annotation: Any) -> type[Settings] | None:
    """Type of the tables that a field holds in an array; None for any other field."""
    kinds = get_args(annotation) if get_origin(annotation) is list else ()
    return next((kind for kind in kinds if is_table(kind)), None)


def general_key(key: str) -> str:
    """A dotted key as the reference has it: `tasks.NAME.source`."""
    return re.sub(r"^(tasks|stages|harnesses|tools|engine\.groups)\.[^.]+", r"\1.NAME", key)


def for_benchmarks(annotation: Any) -> bool:
    """Return whether a setting is of no use to a user."""
    return any(getattr(meta, "extra", None) == BENCHMARKS for meta in getattr(annotation, "__metadata__", ()))


def _leaves(table: type[msgspec.Struct], key: str) -> list[SettingDoc]:
    """The settings of a table that are no tables."""
    leaves = []
    for field in fields_of(table):
        tables = [is_table(field.type), *(of(field.type) for of in (named_tables, kinds_of, listed_table))]
        if not (any(tables) or for_benchmarks(field.type)):
            kind = types.type_info(field.type)
            unit = next((unit for suffix, unit in UNITS.items() if field.name.endswith(suffix)), "")
            name = join_key(key, field.name)
            default = None if field.default is msgspec.NODEFAULT else field.default
            leaves.append(SettingDoc(name, type_text(kind), range_text(kind), default, unit, field.about))
    return leaves


def documented_tables(table: type[msgspec.Struct] = settings.Config, key: str = "") -> Iterator[TableDoc]:
    """Every table of the tree, from the top; after its name, the options of each loss."""
    yield TableDoc(key, about(table), _leaves(table, key))
    for field in fields_of(table):
        if is_table(field.type):
            yield from documented_tables(field.type, join_key(key, field.name))
        elif (named := named_tables(field.type)) is not None:
            yield from documented_tables(named, join_key(key, field.name, "NAME"))
        elif (listed := listed_table(field.type)) is not None:
            for found in documented_tables(listed, join_key(key, field.name)):
                yield msgspec.structs.replace(found, several=True)
        elif kinds := kinds_of(field.type):
            several = get_origin(field.type) is list
            name = join_key(key, field.name, "" if several else "NAME")
            yield from _documented_kinds(kinds, name, field.about, several=several)
        elif join_key(key, field.name) == "learner.loss_options":
            for name, loss in LOSSES.items():
                for options in documented_tables(loss, join_key(key, field.name)):
                    if options.settings:
                        yield msgspec.structs.replace(options, doc=f'With `learner.loss = "{name}"`: {options.doc}')


def _documented_kinds(
    kinds: dict[str, type[msgspec.Struct]], key: str, doc: str, *, several: bool
) -> Iterator[TableDoc]:
    """The tables of an array or with names: their `kind`, then the settings of each kind."""
    kind = SettingDoc(join_key(key, "kind"), type_text(types.LiteralType(tuple(kinds))), "", None, "", "Required.")
    yield TableDoc(key, doc, [kind], several=several)
    for name, table in kinds.items():
        for options in documented_tables(table, key):
            if options.settings:
                yield msgspec.structs.replace(options, doc=f'With `kind = "{name}"`: {options.doc}', several=several)


def known_settings() -> list[str]:
    """Dotted keys of every setting."""
    return [setting.key for table in documented_tables() for setting in table.settings]


@functools.cache
def text_settings() -> frozenset[str]:
    """Dotted keys of the settings that are text."""
    found = (setting for table in documented_tables() for setting in table.settings)
    return frozenset(setting.key for setting in found if setting.type == "string")


def settings_text(prefix: str = "", columns: int = 100) -> str:
    """The tree for a terminal, or the settings whose keys begin with a prefix, wrapped to a width in columns.

    Without a match, settings whose keys contain it.

    Raises:
        LookupError: no key holds it.
    """
    lines, tables = [], list(documented_tables())
    begins = any(setting.key.startswith(prefix) for table in tables for setting in table.settings)
    for table in tables:
        keys = [(setting, setting.key) for setting in table.settings]
        chosen = [setting for setting, key in keys if (key.startswith(prefix) if begins else prefix in key)]
        if chosen:
            lines += [*textwrap.wrap(f"{table.header}  {table.doc}" if table.key else table.doc, columns), ""]
        for setting in chosen:
            unit = f" {setting.unit}" if setting.unit else ""
            head = f"{setting.key} = {toml_text(setting.default)}{unit}  ({setting.expected})"
            lines += textwrap.wrap(head, columns, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
            lines += textwrap.wrap(setting.doc, columns, initial_indent="      ", subsequent_indent="      ")
        if chosen:
            lines.append("")
    if not lines:
        raise LookupError(f"no setting has {prefix!r} in its name; `asyncrl settings` lists all")
    return "\n".join(lines)


def settings_markdown() -> str:
    """The text of docs/reference/settings.md."""
    lines = [INTRODUCTION]
    for table in documented_tables():
        rows = [
            (f"`{one.key}`", one.expected, default and f"`{default}`", one.unit, one.doc)
            for one in table.settings
            for default in [toml_text(one.default)]
        ]
        lines += [f"## `{table.header}`" if table.key else "## Top of the file", "", table.doc, ""]
        lines += [*markdown_table(("setting", "type and range", "default", "unit", "meaning"), rows), ""]
    return "\n".join(lines)
