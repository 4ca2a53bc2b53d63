"""`asyncrl check`: every problem of a config at once, before anything starts."""

from __future__ import annotations

import argparse

from asyncrl.cli.options import add_flag
from asyncrl.cli.target import add_config, add_settings
from asyncrl.config.hints import hints
from asyncrl.config.load import load_config
from asyncrl.run.preflight import check_surroundings
from asyncrl.run.preflight_megatron import memory_lines
from asyncrl.run.preflight_memory import engine_memory_lines, torch_memory_lines
from asyncrl.run.preflight_rows import row_lines
from asyncrl.run.reward_trial import label_hints, reward_lines
from asyncrl.run.sizing import plan
from asyncrl.run.stop_tokens import stop_token_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "demo")
    add_settings(parser)
    add_flag(parser, "--streams", "list the need and the limit of each stream, and when each is full")


def run(arguments: argparse.Namespace) -> int:
    """Print `ok`, hints, stop tokens, rewards of labels, estimates of memory, and the room for streams."""
    loaded = load_config(arguments.config, overrides=arguments.set, further=check_surroundings)
    planned = plan(loaded.config, loaded.base)
    print("ok")
    for hint in (*loaded.warnings, *hints(loaded.config), *planned.hints(), *label_hints(loaded.config, loaded.base)):
        print(f"hint: {hint}")
    for lines in (row_lines, stop_token_lines, reward_lines, memory_lines, torch_memory_lines, engine_memory_lines):
        for line in lines(loaded.config, loaded.base):
            print(line)
    print(planned.line())
    if arguments.streams:
        print(planned.table())
    return 0
