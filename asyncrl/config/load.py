"""Load a config from TOML: all that is wrong with its settings is reported at once, with its line and what to do."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, get_args, get_origin

import msgspec

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.losses import LOSSES
from asyncrl.config import check_data, check_engines, check_learner, check_live
from asyncrl.config.check import contradictions
from asyncrl.config.finding import Finding
from asyncrl.config.key_lines import key_lines
from asyncrl.config.meant import meant_by, option_meant_by
from asyncrl.config.own_algorithms import load_own_algorithms
from asyncrl.config.paths import expand_paths
from asyncrl.config.reference import (
    expected_text,
    general_key,
    is_table,
    join_key,
    kinds_of,
    known_settings,
    named_tables,
    text_settings,
    toml_text,
)
from asyncrl.config.renamed import current_key, current_names
from asyncrl.config.settings import Config
from asyncrl.config.staged import all_learners, as_in, key_of_learner
from asyncrl.errors import AsyncRLError
from asyncrl.host import multiplies_bfloat16

PACKAGE = Path(__file__).parents[1]
SHIPPED = {path.stem: path for path in sorted((PACKAGE / "configs").glob("*.toml"))}
TYPE_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "table"}

_CHECKS: list[Callable[[Config], Iterable[Finding]]] = [
    contradictions,
    check_learner.role_contradictions,
    check_learner.trainer_contradictions,
    check_learner.adapter_contradictions,
    check_live.live_contradictions,
    check_engines.pool_contradictions,
    check_engines.server_contradictions,
    check_engines.direct_contradictions,
    check_engines.share_contradictions,
    check_engines.autoscale_contradictions,
    check_engines.lent_contradictions,
    check_data.data_contradictions,
    check_data.evaluation_contradictions,
]

Table = TypeVar("Table", bound=msgspec.Struct)
FurtherCheck: TypeAlias = Callable[[Config, Path], Iterable[Finding]]
"""Finds what else is wrong with settings, given the folder of their relative paths."""


class Problem(NamedTuple):
    """One thing wrong with a config."""

    line: int | None  # of the file, from 1; None for settings outside it
    key: str  # dotted; `--set KEY` for an override, empty for a fault of the file as a whole
    message: str  # found, expected, what to do

    def text(self, source: str) -> str:
        """`config.toml:12: learner.lr: ...`, or `--set learner.lr: ...`."""
        place = [] if self.key.startswith("--set") else [source if self.line is None else f"{source}:{self.line}"]
        return ": ".join([*place, *([self.key] if self.key else []), self.message])


class ConfigError(AsyncRLError):
    """A config that no run can have, with all that is wrong with it."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(problem.text(source) for problem in problems))
        self.source = source
        self.problems = list(problems)


class LoadedConfig(NamedTuple):
    """A config and its origin."""

    config: Config
    base: Path  # folder that the paths written in the config are relative to
    source: Path  # the TOML file itself
    warnings: tuple[str, ...] = ()  # one for each setting under an old name


def _within(key: str, tables: Iterable[str]) -> bool:
    """Return whether a key is one of `tables`, or inside one of them."""
    return any(key == table or key.startswith(f"{table}.") for table in tables)


def load_config(
    config: str | Mapping[str, Any], *, overrides: Sequence[str] = (), further: FurtherCheck | None = None
) -> LoadedConfig:
    """Read and check a config.

    Args:
        config: a TOML file, the name of a shipped config (`demo`), or the settings; then paths are relative to the
            current folder.
        overrides: `a.b.c=value`; the value is read as TOML and else taken as a plain string.
        further: finds what else is wrong; `asyncrl.run.preflight` looks at what the config names outside itself.

    Raises:
        ConfigError: with the first syntax error, or every problem of the settings and of the overrides.
    """
    if isinstance(config, Mapping):
        source, label, base = Path(), "the settings", Path.cwd()
        text, raw = "", msgspec.to_builtins(config)
    else:
        source, label, base = _find(config)
        text, raw = _read(source, label)
    raw, renamed = current_names(raw)
    lines = key_lines(text)
    lines |= {new: lines[old] for old, new in renamed.items() if old in lines}
    settings, problems = _resolved(raw, overrides, lines, base, further)
    if problems:
        raise ConfigError(label, sorted(problems, key=lambda problem: problem.line or math.inf))
    renamed |= {key: new for key in map(_key_of, overrides) if (new := current_key(key)) != key}
    return LoadedConfig(settings, base, source, tuple(f"{old} is now called {new}" for old, new in renamed.items()))


def _read(source: Path, label: str) -> tuple[str, dict[str, Any]]:
    """The text of a TOML file and its values.

    Raises:
        ConfigError: it cannot be read, or is no valid TOML.
    """
    try:
        text = source.read_text(encoding="utf-8-sig")
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"\(at line (\d+)", str(error))
        number = int(at[1]) if at else len(text.rstrip().split("\n"))
        message = f"not valid TOML: {error}: {text.split(chr(10))[number - 1].strip()}"
        raise ConfigError(label, [Problem(number, "", message)]) from error
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot be read ({error}); expected a TOML file in UTF-8"
        raise ConfigError(label, [Problem(None, "", message)]) from error


def with_overrides(
    config: Config, overrides: Sequence[str], *, base: Path = Path(), further: FurtherCheck | None = None
) -> Config:
    """The settings of a run with others in their place, checked as those of a file are.

    Args:
        overrides: `a.b.c=value`, as for `load_config`.
        further: as for `load_config`.

    Raises:
        ConfigError: with every problem of the overrides.
    """
    changed, problems = _resolved(msgspec.to_builtins(config), overrides, {}, base, further)
    if problems:
        raise ConfigError(f"run {config.run}", problems)
    return changed


def _resolved(
    raw: dict[str, Any], overrides: Sequence[str], lines: dict[str, int], base: Path, further: FurtherCheck | None
) -> tuple[Config, list[Problem]]:
    """Settings from TOML values and overrides, with all that is wrong with them.

    Args:
        lines: of the keys in their file.
    """
    wanted: list[str] = []
    raw = expand_paths(raw)
    problems = [problem for override in overrides if (problem := _override(raw, override, wanted, base))]
    raw, _ = current_names(raw)  # an override may set a table with old names
    findings: list[Finding] = []
    config = _with_dtype(_convert(Config, raw, "", findings))
    # Skip checks that depend on invalid keys; they would test the default value.
    findings += load_own_algorithms(config, base)
    wrong = {key for finding in findings for key in finding.keys}
    options = [found for stage in all_learners(config) for found in _loss_options(config, stage)]
    found = [*dict.fromkeys(options), *(finding for check in _CHECKS for finding in check(config))]
    found += further(config, base) if further else []
    findings += [finding for finding in found if not any(_within(key, wrong) for key in finding.keys)]
    problems += [_located(finding, lines, wanted) for finding in findings]
    return config, list(dict.fromkeys(problems))  # two checks may meet the same damaged file


def _with_dtype(config: Config) -> Config:
    """Choose the type of `learner.dtype = "auto"`: the stored config of a run names it."""
    learner = config.learner
    if learner.dtype != "auto":
        return config
    fast = learner.device != "cpu" or multiplies_bfloat16()
    learner = msgspec.structs.replace(learner, dtype="bfloat16" if fast else "float32")
    return msgspec.structs.replace(config, learner=learner)


def _located(finding: Finding, lines: dict[str, int], overrides: Sequence[str]) -> Problem:
    """A finding at the first of its keys that was written, the command line before the file."""
    for key in finding.keys:
        if _within(key, overrides):
            return Problem(None, f"--set {key}", finding.message)
    below = [override for override in overrides if _within(override, finding.keys[:1])]
    if below and finding.keys[0] not in lines:
        return Problem(None, f"--set {below[0]}", finding.message)
    key = next((key for key in finding.keys if key in lines), finding.keys[0])
    return Problem(lines.get(key), key, finding.message)


def _loss_options(config: Config, stage: str) -> list[Finding]:
    """Options that the loss of a stage does not have, or that contradict each other."""
    learner, findings = as_in(config, stage).learner, list[Finding]()
    table, named = (key_of_learner(config.stages, stage, field) for field in ("loss_options", "loss"))
    fields = LOSSES[learner.loss].__struct_fields__
    known = {name: value for name, value in learner.loss_options.items() if name in fields}
    loss = _convert(LOSSES[learner.loss], known, table, findings)
    for name in [name for name in known if name in loss.idle and not findings]:
        message = f'it has no effect with the other options of loss "{learner.loss}"; remove it, or set what uses it'
        findings.append(Finding((f"{table}.{name}",), message))
    for floor, cap in (("correction_floor", "correction_cap"), ("sequence_floor", "sequence_cap")):
        if not findings and hasattr(loss, floor) and getattr(loss, floor) > getattr(loss, cap):
            key = f"{table}.{floor}"
            findings.append(Finding((key, f"{table}.{cap}"), f"is above {cap}; lower it"))
    for name in learner.loss_options.keys() - known.keys():
        meant = f', did you mean "{near}"?' if (near := option_meant_by(name, fields)) else ""
        known_options = f"its options are {', '.join(fields) or 'none'}"
        message = f'loss "{learner.loss}" has no option "{name}"{meant or f", {known_options}"}'
        findings.append(Finding((f"{table}.{name}",), message))
    return [Finding((*finding.keys, named), finding.message) for finding in findings]


def _find(path_or_name: str) -> tuple[Path, str, Path]:
    """File, the name that errors call it by, and the folder its paths are relative to."""
    if path_or_name in SHIPPED:
        return SHIPPED[path_or_name], f"{path_or_name}.toml", PACKAGE / "examples"
    path = Path(path_or_name)
    if path.is_file():
        return path, path_or_name, path.resolve().parent
    near = difflib.get_close_matches(path_or_name, SHIPPED, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    found = "a directory" if path.is_dir() else "no such file"
    message = f"{found}, and the shipped configs are {', '.join(SHIPPED)}{meant}"
    raise ConfigError(path_or_name, [Problem(None, "", message)])


def _override(raw: dict[str, Any], override: str, wanted: list[str], base: Path) -> Problem | None:
    """Set one `a.b.c=value` in the values of a config and note its key."""
    _, sign, text = override.partition("=")
    key = current_key(_key_of(override))
    parts = key.split(".")
    if not sign or not all(parts):
        return Problem(None, f"--set {override}", "expected KEY=VALUE, such as learner.lr=1e-5")
    table = raw
    for depth, part in enumerate(parts[:-1], 1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return Problem(None, f"--set {key}", f"{'.'.join(parts[:depth])} is not a table in the config")
    table[parts[-1]] = expand_paths(_override_value(key, text.strip()), key, base=base)
    wanted.append(key)
    return None


def _key_of(override: str) -> str:
    return override.partition("=")[0].strip()


def _override_value(key: str, text: str) -> Any:
    """Parse a value from the command line: TOML, or else text; `run=42` is text."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    wants_text = general_key(key) in text_settings() and not isinstance(parsed["value"], str)
    return text if len(parsed) > 1 or wants_text else parsed["value"]


def _convert(table: type[Table], raw: dict[str, Any], prefix: str, findings: list[Finding]) -> Table:
    """A table of settings from TOML values; wrong values are noted and take their defaults."""
    fields = {field.name: field.type for field in msgspec.structs.fields(table)}
    values: dict[str, Any] = {}
    for name, value in raw.items():
        key = join_key(prefix, name)
        if name not in fields:
            _unknown(key, value, list(fields), findings)
        elif (named := named_tables(fields[name])) is not None:
            values[name] = _convert_named(named, fields[name], value, key, findings)
        elif kinds := kinds_of(fields[name]):
            of_names = get_origin(fields[name]) is dict
            values[name] = (_convert_named_kinds if of_names else _convert_kinds)(kinds, value, key, findings)
        elif not is_table(fields[name]):
            try:
                if isinstance(value, float) and not math.isfinite(value):
                    raise msgspec.ValidationError("not finite")
                values[name] = msgspec.convert(value, fields[name], strict=True)
            except msgspec.ValidationError:
                findings.append(_wrong(key, value, expected_text(fields[name])))
        elif isinstance(value, dict):
            values[name] = _convert(fields[name], value, key, findings)
        else:
            findings.append(_wrong(key, value, f"table of settings, [{key}]"))
    return table(**values)


def _convert_named(
    table: type[Table], annotation: Any, raw: Any, prefix: str, findings: list[Finding]
) -> dict[str, Table]:
    """Tables under names of the user's; names that their type forbids are noted."""
    if not isinstance(raw, dict):
        findings.append(_wrong(prefix, raw, f"tables of settings, [{prefix}.NAME]"))
        return {}
    values = {}
    names = get_args(annotation)[0]
    for name, value in raw.items():
        key = join_key(prefix, name)
        try:
            msgspec.convert(name, names)
        except msgspec.ValidationError:
            findings.append(Finding((key,), f'found the name "{name}", expected {names.__metadata__[0].description}'))
            continue
        if isinstance(value, dict):
            values[name] = _convert(table, value, key, findings)
        else:
            findings.append(_wrong(key, value, f"table of settings, [{key}]"))
    return values


def _convert_named_kinds(
    kinds: dict[str, type[msgspec.Struct]], raw: Any, prefix: str, findings: list[Finding]
) -> dict[str, msgspec.Struct]:
    """Tables under names of the user's, each of the kind that it names."""
    if not isinstance(raw, dict):
        findings.append(_wrong(prefix, raw, f"tables of settings, [{prefix}.NAME]"))
        return {}
    values = {}
    for name, value in raw.items():
        if (table := _convert_kind(kinds, value, join_key(prefix, name), findings)) is not None:
            values[name] = table
    return values


def _convert_kinds(
    kinds: dict[str, type[msgspec.Struct]], raw: Any, prefix: str, findings: list[Finding]
) -> list[msgspec.Struct]:
    """Tables of an array, each of the kind that it names."""
    if not isinstance(raw, list):
        findings.append(_wrong(prefix, raw, f"tables of settings, [[{prefix}]]"))
        return []
    found, values = list[Finding](), []
    for number, value in enumerate(raw):
        if (table := _convert_kind(kinds, value, join_key(prefix, str(number)), found)) is not None:
            values.append(table)
    findings += [Finding((*finding.keys, prefix), finding.message) for finding in found]
    return values


def _convert_kind(
    kinds: dict[str, type[msgspec.Struct]], raw: Any, key: str, findings: list[Finding]
) -> msgspec.Struct | None:
    """A table of the kind that it names; None for an unknown kind, which is noted."""
    given = dict(raw) if isinstance(raw, dict) else {}
    kind = kinds.get(str(given.pop("kind", "")))
    if kind is None:
        findings.append(_wrong(key, raw, f"a table with kind = one of {', '.join(map(toml_text, kinds))}"))
        return None
    return _convert(kind, given, key, findings)


def _wrong(key: str, value: Any, expected: str) -> Finding:
    found = toml_text(value)
    shown = found if len(found) <= 60 else f"{found[:57]}..."
    name = TYPE_NAMES.get(type(value), type(value).__name__)
    near = difflib.get_close_matches(value, re.findall(r'"([^"]+)"', expected), n=1) if isinstance(value, str) else []
    meant = f"; did you mean {toml_text(near[0])}?" if near else ""
    table, _, last = key.rpartition(".")
    if last == "loss" and value in list(ADVANTAGES):  # what other frameworks choose by one name is two settings here
        meant = f"; {shown} is a value of {join_key(table, 'advantage')}, see docs/guides/algorithms.md"
    return Finding((key,), f"found {shown} ({name}), expected {expected}{meant}")


def _unknown(key: str, value: Any, siblings: list[str], findings: list[Finding]) -> None:
    """Note an unknown key with a suggestion; each key of an unknown table is noted separately."""
    near = meant_by(key, siblings)
    tables = [one for one in near if any(known.startswith(f"{one}.") for known in known_settings())]
    if isinstance(value, dict) and value and not tables:
        for name, inner in value.items():
            _unknown(join_key(key, name), inner, [], findings)
    elif near:
        findings.append(Finding((key, *near), f"unknown setting; did you mean {' or '.join(near)}?"))
    else:
        known = siblings or list(Config.__struct_fields__)
        findings.append(Finding((key,), f"unknown setting; expected one of {', '.join(known)}"))
