"""`asyncrl model get`: fetch a model into a directory that a config can name."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.cli.options import add_option
from asyncrl.errors import WrongUsage
from asyncrl.models.get import get_model
from asyncrl.models.known import KNOWN, kept_at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["get"], help="fetch a model")
    names = ", ".join(KNOWN)
    about = f"a known name ({names}), a hub id, a Hugging Face model directory, or a GGUF file"
    parser.add_argument("model", metavar="NAME|PATH", help=about)
    add_option(parser, "-o --output DIR", "", "new directory (default: for a known name the user's cache)")


def run(arguments: argparse.Namespace) -> int:
    """Fetch the model; a known one that the cache holds already is reported."""
    if not arguments.output and arguments.model not in KNOWN:
        raise WrongUsage("asyncrl model get: name the new directory with -o DIR")
    output = Path(arguments.output) if arguments.output else kept_at(arguments.model)
    if not arguments.output and output.exists():
        print(f"model in {output}")
        return 0
    get_model(arguments.model, output, lambda line: print(line, flush=True))
    return 0
