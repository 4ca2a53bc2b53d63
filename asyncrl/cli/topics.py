"""`asyncrl topics`: the table of all topics, or one of them with its fields."""

from __future__ import annotations

import argparse

from rich.markdown import Markdown
from rich.table import Table

from asyncrl.cli.options import add_flag, add_option
from asyncrl.cli.output import Terminal, print_json
from asyncrl.config.asyncapi import asyncapi
from asyncrl.config.fields import about
from asyncrl.config.load import load_config
from asyncrl.config.topics_reference import readers_and_writers, topic_section, topics_markdown
from asyncrl.run.user_actors import run_tables
from asyncrl.state.live_tap import no_topic
from topics.table import BUILT_IN, Tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", nargs="?", default="", help="show this topic with all its fields")
    add_option(parser, "--config CONFIG", "", "include the topics of the actors that this config names")
    form = parser.add_mutually_exclusive_group()
    add_flag(form, "--asyncapi", "as an AsyncAPI 3.0.0 document (JSON)")
    add_flag(form, "--markdown", "as the text of docs/reference/topics.md, with every field")


def run(arguments: argparse.Namespace) -> int:
    """Print the table in the wanted form."""
    tables = BUILT_IN
    if arguments.config:
        loaded = load_config(arguments.config)
        tables = run_tables(loaded.config, loaded.base)
    if arguments.asyncapi:
        print_json(asyncapi(tables))
    elif arguments.markdown:
        print(topics_markdown(tables).rstrip("\n"))
    elif arguments.topic:
        if arguments.topic not in tables.by_name:
            raise no_topic(arguments.topic, tables)
        Terminal().print(Markdown("\n".join(topic_section(tables.by_name[arguments.topic], tables))))
    else:
        Terminal().print(topics_table(tables))
    return 0


def topics_table(tables: Tables = BUILT_IN) -> Table:
    """The table for a terminal."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("topic", "publishers", "subscribers", "about"):
        table.add_column(column, no_wrap=column == "topic")
    for topic in tables.topics:
        first, _, _ = about(topic.message).partition(". ")
        of_topic = (topic.name, *readers_and_writers(topic, tables))
        table.add_row(*of_topic, first.removesuffix("."))
    return table
