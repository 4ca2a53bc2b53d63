"""`asyncrl COMMAND`: one file per command, each imported only when it is asked for."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from asyncrl.errors import AsyncRLError
from asyncrl.files import UNWRITABLE
from asyncrl.telemetry.printable import PrintableOutput

COMMANDS = {
    "up": "start or resume a run on this machine, and watch it",
    "rollout": "sample and grade completions without training, and write them as a Parquet file",
    "top": "watch actors, engines, trajectories, waits, findings and logs in a terminal",
    "status": "show how a run is doing",
    "web": "show a run in a browser",
    "report": "write a page with the data of a run, as one HTML file",
    "runs": "list the runs in this folder, or on a NATS server",
    "rm": "remove runs that are over",
    "samples": "print sampled completions with their labels and rewards",
    "down": "stop a run; `up --resume` continues it",
    "unpause": "train again after an alert paused the run",
    "cost": "show GPU hours, tokens and seconds by cause, and what to scale first",
    "trace": "write the run as a trace for Perfetto",
    "doctor": "find what keeps a run from advancing, and what to do",
    "scale": "change the number of processes of a role",
    "share": "divide engines and workers among several runs by weight",
    "stage": "list the stages of a run, or switch to another one",
    "engines": "list inference servers; add and remove servers that the run did not start",
    "tap": "print the messages on a run's topics",
    "profile": "record steps of the learner, stacks of an actor, or an inference server",
    "stack": "print what the threads of an actor do",
    "logs": "print the logs of the actors, also of a run that is over",
    "audit": "prove that nothing was lost and nothing was trained twice",
    "explain": "show the history of one trajectory",
    "show": "show one trajectory as a conversation, with tokens coloured by version, log-prob or mask",
    "weights": "list the versions of the weights; promote one to the channel `live`, or roll it back",
    "dead": "list dead letters (unreadable messages and poison), and issue them again",
    "compare": "judge the metrics of a run by those of trusted runs, with an exit code for CI",
    "diff": "show the settings and metrics in which two runs differ",
    "replay": "train again from the batch log, and compare the results",
    "dump": "write one batch as plain files, to use in a notebook",
    "export": "write the metrics of a finished run to TensorBoard, W&B or another tool",
    "select": "write the rows that the policy solves sometimes, as data for another run",
    "fork": "start a new run from a step of another, and watch it",
    "keys": "add, list and revoke API keys of the gateway",
    "purge": "make unreadable what a tenant or a user said to the gateway",
    "topics": "print all topics with their publishers, subscribers and retention",
    "roles": "print what each role may publish and subscribe to, or make a user for each",
    "check": "list every problem of a config without starting anything",
    "plan": "measure engine and trainer of a config alone, and propose devices, slots and batch",
    "sandboxes": "serve the sandboxes of this machine to workers elsewhere",
    "model": "fetch a model: a known name, a hub id, a directory or a GGUF file",
    "settings": "print every setting of a config",
    "chaos": "kill and freeze processes of a run, then audit it",
    "bench": "measure asyncrl on this machine",
}
_WHOSE = "the files of a run belong to its owner: work as that user, or watch it with the monitor's --credentials"
_EXAMPLES = """\
examples:
  asyncrl up                              run the demo here and watch it
  asyncrl up my.toml --set learner.lr=1e-5
  asyncrl status                          from any other terminal
  asyncrl scale rollout=4 reward=2
  asyncrl tap 'trajectory.graded' --where reward=1.0

`asyncrl COMMAND --help` describes one command.
"""


def main() -> int:
    """Run what the command line asks for; returns 0 for success, 1 for failure, 2 for wrong usage."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a terminal may know few characters
    sys.stdout, sys.stderr = PrintableOutput(sys.stdout), PrintableOutput(sys.stderr)
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Nothing may be written any more, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def run(words: Sequence[str]) -> int:
    """Run one command and print errors that a user can fix. Returns the exit code."""
    try:
        arguments, unknown = parser_for(words).parse_known_args(words)
        if unknown:
            arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return int(arguments.run(arguments))
    except AsyncRLError as fault:
        print(fault, file=sys.stderr)
        return fault.exit_code
    except PermissionError as error:
        print(f"{error.filename}: {error.strerror}; {_WHOSE}", file=sys.stderr)
        return 1
    except FileNotFoundError as error:
        print(f"{error.filename}: {error.strerror}; was it removed or moved?", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        print(
            f"{error.filename or 'a file of the run'}: {error.strerror}; nothing can be written there", file=sys.stderr
        )
        return 1


def parser_for(words: Sequence[str]) -> argparse.ArgumentParser:
    """A parser that knows every command, and the options of the one that is asked for."""
    parser = argparse.ArgumentParser(
        prog="asyncrl",
        description="Asynchronous reinforcement learning for language models: actors that talk only through topics.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"asyncrl {version('asyncrl')}")
    parser.set_defaults(run=_print_help, parser=parser)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    asked = next((word for word in words if not word.startswith("-")), "")
    for name, about in COMMANDS.items():
        command = subparsers.add_parser(name, help=about)
        if name == asked:
            gc.disable()  # passes of the collector over what imports make are a seventh of their time
            module = importlib.import_module(f"asyncrl.cli.{name}")
            gc.enable()
            command.set_defaults(run=module.run, parser=command)
            module.add_arguments(command)
    return parser


def _print_help(arguments: argparse.Namespace) -> int:
    arguments.parser.print_help()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
