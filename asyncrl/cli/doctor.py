"""`asyncrl doctor`: why a run does not come further, or how it ended, and what to do."""

from __future__ import annotations

import argparse
import asyncio

from asyncrl.cli.output import add_json, show
from asyncrl.cli.target import add_run, any_run, tables_of
from asyncrl.state.diagnose import diagnose
from asyncrl.state.exit_status import how_it_ended
from asyncrl.state.headline import headline
from asyncrl.state.idle import idle_hints
from asyncrl.state.records import counted
from asyncrl.state.watch import collect_state
from topics.stalls import StallFound


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Collect, diagnose, print; returns 1 where anything was found."""
    found = any_run(arguments)
    hints: list[str] = []
    if found.is_held:
        state = asyncio.run(collect_state(found.address, found.run, found.root, tables_of(arguments)))
        line, findings, hints = headline(state), diagnose(state), idle_hints(state)
    else:
        line, findings = how_it_ended(found.files)
    values = {"run": found.run, "state": line, "findings": findings, "hints": hints}
    text = "\n".join([findings_text(found.run, line, findings), *(f"hint: {hint}" for hint in hints)])
    show(arguments, values, lambda: text)
    return 1 if findings else 0


def advice(finding: StallFound, run: str) -> str:
    """Return what to do, with the run's name in the commands."""
    return finding.advice.replace("--resume RUN", f"--resume {run}")


def findings_text(run: str, line: str, findings: list[StallFound]) -> str:
    """Return the findings as text."""
    if not findings:
        return f"run {run}: {line}"
    texts = [
        f"{finding.cause}: {finding.object}\n  seen:  {finding.evidence}\n  to do: {advice(finding, run)}"
        for finding in findings
    ]
    return "\n".join([f"run {run}: {counted(len(findings), 'finding')}", *texts])
