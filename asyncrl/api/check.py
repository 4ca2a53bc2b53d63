"""Checking a config before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

from asyncrl.api.blocking import on_thread
from asyncrl.api.overrides import as_words
from asyncrl.config.hints import hints, slot_lines
from asyncrl.config.load import ConfigError, Problem, load_config
from asyncrl.run.capabilities import capability_lines, padding_hints
from asyncrl.run.preflight import check_surroundings
from asyncrl.run.preflight_harness import sandbox_hints
from asyncrl.run.preflight_memory import memory_lines
from asyncrl.run.preflight_rows import row_lines
from asyncrl.run.reward_trial import label_hints, reward_lines
from asyncrl.run.sizing import plan
from asyncrl.run.stop_tokens import stop_token_lines

_FACTS = (row_lines, stop_token_lines, reward_lines, slot_lines, memory_lines)


class Findings(NamedTuple):
    """The findings of a check of a config."""

    problems: Sequence[Problem]  # a run starts only without any
    hints: Sequence[str] = ()
    facts: Sequence[str] = ()  # lines about rows, stop tokens, rewards, memory and room for streams
    source: str = ""  # name of the config

    @property
    def ok(self) -> bool:
        """Return whether a run with the config can start."""
        return not self.problems

    def __str__(self) -> str:
        """Return all findings, one a line."""
        found = [problem.text(self.source) for problem in self.problems] or ["ok"]
        return "\n".join([*found, *(f"hint: {hint}" for hint in self.hints), *self.facts])


def check(
    config: str | PathLike[str] | Mapping[str, Any] = "demo", overrides: Mapping[str, Any] | Sequence[str] = ()
) -> Findings:
    """Find every problem of a config at once, without starting anything.

    Args:
        config: a TOML file, the name of a shipped config, or the settings as nested dictionaries.
        overrides: values by dotted key, such as `{"learner.steps": 50}`, or texts `learner.steps=50`.
    """
    given = config if isinstance(config, Mapping) else str(config)
    return on_thread(lambda: _check(given, as_words(overrides)))


def _check(config: str | Mapping[str, Any], overrides: Sequence[str]) -> Findings:
    try:
        loaded = load_config(config, overrides=overrides, further=check_surroundings)
    except ConfigError as error:
        return Findings(error.problems, source=error.source)
    settings, base = loaded.config, loaded.base
    planned = plan(settings, base)
    found = [
        *loaded.warnings,
        *hints(settings),
        *planned.hints(),
        *label_hints(settings, base),
        *sandbox_hints(settings),
        *padding_hints(settings, base),
    ]
    facts = [*capability_lines(settings.model, base), *(line for lines in _FACTS for line in lines(settings, base))]
    return Findings([], found, [*facts, planned.line()])
