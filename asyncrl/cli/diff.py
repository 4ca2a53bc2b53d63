"""`asyncrl diff`: the settings and metrics in which two runs differ."""

from __future__ import annotations

import argparse

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from asyncrl.cli.compare import files_of
from asyncrl.cli.options import add_flag, add_option
from asyncrl.cli.output import add_json, show
from asyncrl.config.reference import toml_text
from asyncrl.errors import WrongUsage
from asyncrl.state.compare import read_figures
from asyncrl.state.run_diff import MetricDiff, SettingDiff, common_metrics, metric_diffs, setting_diffs
from asyncrl.telemetry.metric_names import MAIN, read_rows


class RunDiff(msgspec.Struct):
    """The differences of two runs."""

    settings: list[SettingDiff]
    metrics: list[MetricDiff]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="name or directory of a run")
    parser.add_argument("second", metavar="B", help="name or directory of another run")
    add_flag(parser, "--all", f"all metrics that both have, not only {', '.join(MAIN)}")
    add_option(parser, "--window STEPS", 5, "steps over which a mean is taken")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the differences."""
    if arguments.window < 1:
        raise WrongUsage("--window is 1 or more steps")
    pair = (arguments.first, arguments.second)
    files = [files_of(name) for name in pair]
    names = common_metrics([read_rows(one.metrics, "step") for one in files]) if arguments.all else list(MAIN)
    settings = setting_diffs(*(one.read_config() for one in files))
    first, second = (read_figures(one.metrics, names) for one in files)
    metrics = metric_diffs(first, second, arguments.window)
    show(arguments, RunDiff(settings, metrics), lambda: _text(pair, settings, metrics))
    return 0


def _text(pair: tuple[str, str], settings: list[SettingDiff], metrics: list[MetricDiff]) -> RenderableType:
    settings_table = Table("setting", *pair, box=None, header_style="dim")
    for diff in settings:
        settings_table.add_row(diff.setting, Text(_value(diff.first)), Text(_value(diff.second)))
    metrics_table = Table("metric", "step", *pair, "change", box=None, header_style="dim")
    for one in metrics:
        change = f"{(one.second - one.first) / abs(one.first):+.1%}" if one.first else ""
        metrics_table.add_row(one.metric, f"{one.step:,}", f"{one.first:.4g}", f"{one.second:.4g}", change)
    shown = [settings_table if settings else Text("the settings are equal"), Text("")]
    return Group(*shown, metrics_table if metrics else Text("no step is in the metrics of both runs"))


def _value(value: object) -> str:
    return "" if value is None else toml_text(value)
