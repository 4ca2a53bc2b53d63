"""`asyncrl export`: write the metrics of a finished run to a sink, after the rows that the sink has."""

from __future__ import annotations

import argparse

import msgspec

from actors.recorder.actor import began_s
from actors.recorder.sinks import named, sink_run
from asyncrl.cli.options import add_option
from asyncrl.cli.target import add_run, any_run
from asyncrl.errors import WrongUsage
from asyncrl.run.directory import is_locked
from asyncrl.sinks.feed import SinkFeed
from asyncrl.sinks.kinds import KINDS
from asyncrl.sinks.sink import SinkError, SinkSettings
from asyncrl.state.records import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the newest", remote=False)
    kinds = [name for name, kind in KINDS.items() if kind.stores]
    parser.add_argument("--to", required=True, choices=kinds, help="kind of the sink")
    words = "setting of the sink, such as project=sums (default: the `[[metrics]]` table of this kind in the config)"
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help=words)
    add_option(parser, "--name NAME", "", "name of the sink in RUN/sinks, where its position is (default: the kind)")


def run(arguments: argparse.Namespace) -> int:
    """Write the rows that the sink lacks."""
    found = any_run(arguments)
    files = found.files
    if is_locked(files.root):
        raise WrongUsage(
            f"run {found.run} is live: name sinks in `[[metrics]]` of its config; export it once it is over"
        )
    config = files.read_config()
    name = arguments.name or arguments.to
    settings = _settings(arguments, dict(named(config.metrics)).get(name))
    if problem := settings.problem():
        raise SinkError(problem)
    feed = SinkFeed(name, settings.sink(sink_run(config, files, began_s(files.root))), files.metrics)
    feed.open()
    before = feed.total
    while feed.advance(files.metrics.stat().st_size):
        pass
    feed.close()
    print(f"{arguments.to}: {counted(feed.total - before, 'row')} written, {before} were there")
    return 0


def _settings(arguments: argparse.Namespace, known: SinkSettings | None) -> SinkSettings:
    """The settings of the command line, or those of the run's config."""
    options = dict(option.partition("=")[::2] for option in arguments.option)
    if known is not None and known.kind == arguments.to and not options:
        return known
    try:
        return msgspec.convert({"kind": arguments.to, **options}, KINDS[arguments.to], strict=False)
    except msgspec.ValidationError as error:
        raise WrongUsage(f"--option {' '.join(arguments.option)}: {error}; see `asyncrl settings metrics`") from error
