"""`asyncrl audit`: prove from a run's topics that nothing was lost and nothing was trained twice."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from functools import partial
from pathlib import Path

from actors.prompter.data_order import DataOrder
from asyncrl.cli.options import add_flag
from asyncrl.cli.target import add_run, any_run, read_topics
from asyncrl.state.audit.audit import Findings, Queue
from asyncrl.state.audit.reading import Audited, audit_run
from asyncrl.state.records import counted
from topics.roles import role_of

_SHOWN = 20  # violations printed; all are counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_flag(parser, "--deep", "read every stored result and row, and compare them with their digests and the data")


def run(arguments: argparse.Namespace) -> int:
    """Read, compare, print the result; returns 1 for violations."""
    found = any_run(arguments)
    base = Path() if found.root is None else found.files.base
    own_code = found.root is not None
    check = partial(DataOrder, base=base, own_code=own_code) if arguments.deep else None

    how = {
        "deep": arguments.deep,
        "check_rows": check,
        "own_code": own_code,
        "report": _progress if sys.stderr.isatty() else None,
    }
    audited = read_topics(found, "audit", lambda bus: audit_run(bus, **how))
    print(findings_text(audited))
    return 1 if audited.findings.violations else 0


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def findings_text(audited: Audited) -> str:
    """Return the result of an audit as text."""
    wrong = audited.findings.violations
    verdict = counted(len(wrong), "violation") if wrong else "clean"
    lines = [f"run {audited.run}: {verdict}"]
    lines += [f"{name:>14}  {text}" for name, text in _table(audited.findings, audited.queues)]
    lines += [f"{'not compared':>14}  {note}" for note in audited.notes]
    if wrong:
        kinds = Counter(violation.kind for violation in wrong)
        lines += ["", *(f"{count:>14,}  {kind}" for kind, count in kinds.most_common()), ""]
        lines += [f"{bad.kind}: {bad.id}: found {bad.found}; expected {bad.expected}" for bad in wrong[:_SHOWN]]
        if len(wrong) > _SHOWN:
            lines.append(f"... and {len(wrong) - _SHOWN:,} more")
    return "\n".join(lines)


def _table(findings: Findings, queues: dict[str, Queue]) -> list[tuple[str, str]]:
    def each(counts: dict[str, int]) -> str:
        return "".join(f"   {name}: {count:,}" for name, count in counts.items())

    def held(role: str) -> str:
        own = [queue for name, queue in queues.items() if role_of(name) == role]
        if not own:
            return ""
        waiting, handed_out = sum(queue.waiting for queue in own), sum(queue.unacknowledged for queue in own)
        return f" ({waiting:,} wait in its queue, {handed_out:,} are handed out)"

    open_now = [f"{role} {count:,}{held(role)}" for role, count in findings.open.items()]
    lags = {"supervised" if lag < 0 else str(lag): tokens for lag, tokens in findings.tokens_by_lag.items()}
    purged = f"{findings.purged:,} messages of live traffic have no content any more"
    always = [
        ("versions", f"{findings.versions:,} published"),
        ("unreadable", counted(findings.unreadable, "message")),
        *([("purged", purged)] if findings.purged else []),
        *(("changed", f"{path} after step {step}") for path, step in findings.changed_inputs.items()),
    ]
    if not (findings.issued or findings.batches):
        what = "versions with the engines that took them and with channels, logs with their writers; nothing was issued"
        return [("compared", what), *always]
    return [
        ("issued", f"{findings.issued:,}"),
        ("trained", f"{findings.trained:,}"),
        ("packed", f"{findings.packed:,} in batches not trained yet"),
        ("evaluated", f"{counted(findings.evaluated, 'answer')} to held-out prompts"),
        ("dropped", f"{sum(findings.dropped.values()):,}{each(findings.dropped)}"),
        ("open", f"{sum(findings.open.values()):,}   {', '.join(open_now)}".rstrip()),
        (
            "batches",
            f"{findings.batches:,} packed, {findings.trained_batches:,} trained, newest lineage {findings.lineage}",
        ),
        ("tokens by lag", each(lags).strip() or "none"),
        ("results", f"{findings.payloads:,} still stored"),
        *always,
    ]
