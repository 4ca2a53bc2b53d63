"""`asyncrl topics`: the table of all topics: publishers, subscribers, and how long each is kept."""

from __future__ import annotations

import argparse

from asyncrl.cli.output import print_json
from asyncrl.config.asyncapi import asyncapi
from asyncrl.config.fields import about
from asyncrl.config.load import load_config
from asyncrl.config.topics_reference import KEPT, roles, topics_markdown
from asyncrl.run.user_actors import load_actors
from topics.table import TOPICS, subscribers_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--config", default="", help="with the topics of the actors that this config names")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--asyncapi", action="store_true", help="as an AsyncAPI 3.0.0 document (JSON)")
    form.add_argument("--markdown", action="store_true", help="as the text of docs/topics.md, with every field")


def run(arguments: argparse.Namespace) -> int:
    """Print the table in the wanted form."""
    if arguments.config:
        loaded = load_config(arguments.config)
        load_actors(loaded.config.actors, loaded.base)
    if arguments.asyncapi:
        print_json(asyncapi())
    else:
        print((topics_markdown() if arguments.markdown else topics_text()).rstrip("\n"))
    return 0


def topics_text() -> str:
    """The table for a terminal: one topic a line, columns aligned."""
    rows = [("TOPIC", "MESSAGE", "STREAM", "KEPT", "PUBLISHERS", "SUBSCRIBERS", "ABOUT")]
    for topic in TOPICS:
        rows.append(
            (
                topic.name,
                topic.message.__name__,
                topic.stream.name,
                KEPT[topic.stream.keep],
                roles(topic.publishers),
                roles(subscribers_of(topic)),
                about(topic.message),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )
