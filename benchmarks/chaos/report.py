"""The report of a chaos run: table, plot and JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.state.audit.audit import Findings
from benchmarks.chaos.injections import Injection
from benchmarks.chaos.memory import Growth
from benchmarks.chaos.stall import Stall

FAMILIES = ("kill", "freeze", "wake", "crash")
_LOST = (
    "lost",
    "hidden loss",
    "left over",
    "overdue",
    "dropped without cause",
    "left out",
    "no end",
    "never issued",
    "damaged payload",
)
_WINDOW = 5  # steps that rewards are averaged over
_SHOWN = 20


class Report(msgspec.Struct, kw_only=True):
    """All results of one run under chaos."""

    run: str
    seed: int
    code: int | None  # of `asyncrl up`; None: the run stalled
    stall: Stall | None  # None: the run did not stall
    output: str = ""  # the last lines of `asyncrl up`, if it failed
    finished: bool = False
    injections: list[Injection] = []
    unreached: dict[str, int] = {}  # armed points that no process passed in time
    unrecovered: list[str] = []  # roles that did not recover within the limit after an injection
    resumed: int  # number of `up --resume` calls
    prompts: int = 0
    trajectories: int = 0  # issued
    trained: int = 0
    tokens: int = 0  # in results
    tokens_again: int = 0  # upper bound of the tokens that were sampled twice
    lost: list[str] = []
    duplicated: list[str] = []
    violations: list[str] = []  # of the audit
    steps: int
    rewards: dict[int, float] = {}  # by RL step
    undisturbed: dict[int, float] | None = None  # rewards of the run for comparison
    memory: dict[str, Growth] = {}  # by role

    @property
    def clean(self) -> bool:
        """Return whether the run completed and the audit found no fault."""
        wrong = self.lost or self.duplicated or self.violations or self.unrecovered
        return self.finished and self.code == 0 and not wrong


def violations_by_sense(findings: Findings) -> tuple[list[str], list[str], list[str]]:
    """Split the violations of an audit: lost, duplicated, and all others."""
    lost: list[str] = []
    twice: list[str] = []
    other: list[str] = []
    for bad in findings.violations:
        sense = lost if bad.kind in _LOST else twice if bad.kind == "issued twice" else other
        sense.append(f"{bad.kind}: {bad.id}: found {bad.found}; expected {bad.expected}")
    return lost, twice, other


def report_text(report: Report) -> str:
    """Return the table as text."""
    verdict = "clean" if report.clean else "NOT CLEAN"
    end = "finished" if report.finished else "did not finish"
    end += f" (exit code {report.code})" if report.code else " (stopped)" if report.code is None else ""
    lines = [
        *([f"verdict: {report.stall.text}", ""] if report.stall is not None else []),
        f"run {report.run}, seed {report.seed}: {end}, {len(report.injections)} injections, {verdict}",
        "",
        f"{'role':>14}  {'kill':>5} {'freeze':>6} {'wake':>5} {'crash':>5}   works again after (s)",
        *_rows(report.injections),
        "",
        *(f"{name:>14}  {text}" for name, text in _figures(report)),
    ]
    lines += [f"output: {line}" for line in report.output.splitlines()[-_SHOWN:]]
    for name in ("unrecovered", "lost", "duplicated", "violations"):
        found = getattr(report, name)
        lines += [f"{name}: {text}" for text in found[:_SHOWN]]
        lines += [f"... and {len(found) - _SHOWN:,} more"] if len(found) > _SHOWN else []
    return "\n".join(lines)


def _rows(injections: Sequence[Injection]) -> list[str]:
    lines = []
    for role in dict.fromkeys(injection.role for injection in injections):
        of_role = [injection for injection in injections if injection.role == role]
        counts = Counter(injection.kind if injection.kind in FAMILIES else "crash" for injection in of_role)
        given = " ".join(f"{counts[family] or '-':>{max(5, len(family))}}" for family in FAMILIES)
        lines.append(f"{role:>14}  {given}   {_recovery(role, injections)}")
    return lines


def _recovery(role: str, injections: Sequence[Injection]) -> str:
    """Seconds until a role recovered from an injection of this role alone, of several roles, and from a freeze."""

    def text(times: list[float]) -> str:
        return f"{statistics.median(times):.1f} median, {max(times):.1f} at most"

    dead = [
        injection.works_again_s[role]
        for injection in injections
        if role in injection.works_again_s and injection.kind != "freeze"
    ]
    frozen = [
        injection.works_again_s[role]
        for injection in injections
        if role in injection.works_again_s and injection.kind == "freeze"
    ]
    return "   ".join([*([text(dead)] if dead else []), *([f"frozen: {text(frozen)}"] if frozen else [])]) or "-"


def _figures(report: Report) -> list[tuple[str, str]]:
    points = Counter(injection.kind for injection in report.injections if injection.kind not in FAMILIES)
    passed = {f"{injection.role}@{injection.kind}" for injection in report.injections}
    unreached = sorted(name for name in report.unreached if name not in passed)
    share = f" ({100 * report.tokens_again / report.tokens:.2f} %)" if report.tokens else ""
    return [
        ("crash points", ", ".join(f"{name} {count}" for name, count in sorted(points.items())) or "none"),
        ("not reached", ", ".join(unreached) or "none"),
        ("up --resume", f"{report.resumed} times"),
        ("prompts", f"{report.prompts:,}"),
        ("trajectories", f"{report.trajectories:,} issued, {report.trained:,} trained"),
        ("lost", f"{len(report.lost):,}"),
        ("duplicated", f"{len(report.duplicated):,}"),
        ("violations", f"{len(report.violations):,} more"),
        ("tokens again", f"at most {report.tokens_again:,} of {report.tokens:,}{share} were sampled twice"),
        ("reward", _curve(report)),
        ("memory", "resident MB of each role, in the second quarter of the time, in the last, and at most:"),
        *(
            (role, f"{grown.first_mb:,.0f}, {grown.last_mb:,.0f}, {grown.most_mb:,.0f}")
            for role, grown in report.memory.items()
        ),
    ]


def _curve(report: Report) -> str:
    own = f"{_last(report.rewards)} over the last {_WINDOW} of {len(report.rewards)} steps"
    return own if report.undisturbed is None else f"{own}; undisturbed {_last(report.undisturbed)}"


def _last(rewards: Mapping[int, float]) -> str:
    newest = [rewards[step] for step in sorted(rewards)[-_WINDOW:]]
    return f"{statistics.fmean(newest):.3f}" if newest else "none"


def draw(path: Path, report: Report) -> None:
    """Plot reward over steps, with the undisturbed run for comparison and a mark for each injection."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    curves: list[tuple[str, Mapping[int, float], dict[str, Any]]] = [("this run", report.rewards, {"color": "#1f4e8c"})]
    if report.undisturbed is not None:
        curves.append(("undisturbed", report.undisturbed, {"color": "#8a8a8a", "linestyle": "--"}))
    for label, rewards, style in curves:
        steps = sorted(rewards)
        axes.plot(
            steps,
            [
                statistics.fmean(rewards[at] for at in steps[max(0, end - _WINDOW) : end])
                for end in range(1, len(steps) + 1)
            ],
            label=label,
            **style,
        )
    marks = [max(0, injection.step or 0) for injection in report.injections]
    label = f"{len(marks)} injections (those of the warm-up at step 0)"
    foot = axes.get_xaxis_transform()
    axes.plot(marks, [0.01] * len(marks), "|", color="#b0562c", transform=foot, markersize=9, label=label)
    axes.set_title(f"run {report.run} under chaos")
    axes.set_xlabel("step")
    axes.set_ylabel(f"sampled reward, mean of {_WINDOW} steps")
    axes.legend(loc="lower right", frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
