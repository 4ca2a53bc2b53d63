"""The summary printed at the end of a run."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncrl.state.records import FLAT_STEPS, counted
from asyncrl.telemetry.metric_names import MAIN


def summary_text(summary: dict[str, Any]) -> str:
    """A run's figures for people, one a line."""
    rows = summary_rows(summary)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:>{width}}  {value}" for name, value in rows)


def summary_panel(summary: dict[str, Any]) -> RenderableType:
    """The same for a terminal."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary_rows(summary):
        table.add_row(name, Text(value))
    title = Text.assemble((" asyncrl ", "dim"), (f"{summary['run']} ", "bold"))
    return Panel(Padding(table, (1, 1)), title=title, title_align="left", border_style="bright_black")


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and figures, the most wanted first."""
    further = [*summary.get("reports", {}).items(), *_requests(summary), *_card(summary)]
    if not summary.get("trains", True):
        issued, tokens = summary.get("trajectories_issued", 0), summary.get("sampled_tokens", 0)
        sampled = [("sampled", f"{tokens:,} tokens of {issued:,} trajectories")] if issued else []
        return [*further, *sampled, ("wall time", _wall_time(summary))]
    return [
        *further,
        *(_of_rl(summary) if summary["steps"] else _before_rl(summary)),
        ("metrics", summary["metrics"]),
        *((name, summary[name]) for name in ("plot", "report") if name in summary),
        ("model", summary["exported_model"] or "not exported: the run did not finish"),
    ]


def _before_rl(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what there is of a run that ended before its first step of RL."""
    warm, accuracy, issued = summary["warmup_steps"], summary["greedy_accuracy_before"], summary["trajectories_issued"]
    steps = f"the run ended after {counted(warm, 'step')} of warm-up" if warm else "the run ended before its first step"
    rows = [("steps", f"none of RL: {steps}")]
    rows += [("accuracy", _number(accuracy))] if accuracy is not None else []
    rows += [("trajectories", f"{issued:,} issued, {summary['trajectories_failed']:,} failed")] if issued else []
    return [*rows, *_dropped(summary), ("wall time", _wall_time(summary))]


def _of_rl(summary: dict[str, Any]) -> list[tuple[str, str]]:
    lags = summary["trained_tokens_by_lag"]
    total = sum(lags.values()) or 1
    histogram = "   ".join(f"{lag}: {100 * count / total:.0f} % ({count:,})" for lag, count in lags.items())
    return [
        ("sampled reward", _change(summary["sampled_reward_first_step"], summary["sampled_reward_last_5_steps"])),
        *_remarks(summary),
        *_accuracy(summary),
        *((f"accuracy, {name}", _by_version(found)) for name, found in summary.get("accuracy_by_set", {}).items()),
        ("steps", f"{summary['steps']} of RL after {summary['warmup_steps']} of warm-up"),
        (
            "trajectories",
            f"{summary['trajectories_trained']:,} trained of {summary['trajectories_issued']:,} issued, "
            f"{summary['trajectories_failed']:,} failed",
        ),
        *_dropped(summary),
        ("tokens", f"{summary['trained_tokens']:,} trained of {summary['sampled_tokens']:,} sampled{_pace(summary)}"),
        ("tokens by lag", histogram or "no trained token"),
        ("wasted tokens", _percent(summary["wasted_token_share"])),
        ("responses", _responses(summary.get("last_batch", {}))),
        *((name, f"{value:.3f} in the last batch") for name, value in own_metrics(summary.get("last_batch", {}))),
        ("learner", f"{summary['learner_train_s']} s training, {summary['learner_wait_s']} s waiting for batches"),
        *_seconds_to_grade(summary.get("last_batch", {})),
        ("wall time", _wall_time(summary)),
    ]


def _dropped(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return how many trajectories ended untrained, for which reason each."""
    reasons = summary["dropped_trajectories_by_reason"].items()
    return [("dropped", ", ".join(f"{count:,} for {reason}" for reason, count in reasons))] if reasons else []


def _requests(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what clients of a gateway got."""
    ends, serves = summary.get("requests_by_finish", {}), not summary.get("trains", True)
    failed = f"{ends.get('failed', 0):,} failed, {ends.get('gone', 0):,} left by their clients"
    text = f"{sum(ends.values()):,} of clients, {failed}, {summary.get('request_tokens', 0):,} tokens sampled"
    return [("requests", text)] if ends or (serves and not summary.get("trajectories_issued")) else []


def _card(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return how often a GPU was passed on, and how long that takes."""
    if not (turns := summary.get("card_turns", 0)):
        return []
    back = summary["card_back_median_s"]
    engine = "" if back is None else f", {back:.2f} s until an engine serves again"
    return [
        (
            "card turns",
            f"{turns:,}; median {summary['card_wait_median_s']:.2f} s until the learner has it{engine}",
        )
    ]


def _wall_time(summary: dict[str, Any]) -> str:
    """Return the seconds from the first message to the last, and of them RL and what lay before each resumption."""
    of_it = [f"RL {summary['rl_wall_s'] or 0} s"] if summary["steps"] else []
    of_it += [f"{summary['stopped_s']} s stopped"] if summary["stopped_s"] else []
    wall_s = round(summary["wall_s"] + summary["stopped_s"], 2)
    return f"{wall_s} s" + (f", of which {' and '.join(of_it)}" if of_it else "")


def _accuracy(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the greedy accuracy of a run that measured it."""
    before, after = summary["greedy_accuracy_before"], summary["greedy_accuracy_after"]
    return [] if before is None and after is None else [("accuracy", _change(before, after))]


def _remarks(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return remarks that the figures do not show by themselves."""
    if (flat := summary.get("steps_without_spread", 0)) < FLAT_STEPS:
        return []
    return [("nothing learned", f"in the last {flat:,} steps all rewards of a batch were equal; see: asyncrl samples")]


def _change(before: float | None, after: float | None) -> str:
    return f"{_number(before)} before → {_number(after)} after"


def _responses(figures: dict[str, float]) -> str:
    """Lengths and truncation of the last batch."""
    if not figures:
        return "none"
    mean, longest = figures["response_tokens_mean"], figures["response_tokens_max"]
    flat = figures.get("flat_groups_share")
    groups = "" if flat is None else f", {100 * flat:.0f} % of groups without spread"
    return f"{mean:,.1f} tokens, {longest:,.0f} at most, {_percent(figures['truncated_share'])} truncated{groups}"


def _pace(summary: dict[str, Any]) -> str:
    rate = summary["rl_trained_tokens_per_s"]
    return "" if rate is None else f", {rate:,.0f} trained per second"


def _seconds_to_grade(figures: dict[str, float]) -> list[tuple[str, str]]:
    """Return how long the answers of the last batch took."""
    if "issue_to_grade_s_mean" not in figures:
        return []
    mean, longest = figures["issue_to_grade_s_mean"], figures["issue_to_grade_s_max"]
    return [("issue to grade", f"{mean:.1f} s mean, {longest:.1f} s at most in the last batch")]


def own_metrics(figures: dict[str, float]) -> list[tuple[str, float]]:
    """The metrics that the reward itself gave, of the figures of a batch."""
    return [(name, value) for name, value in figures.items() if name.startswith("reward/") and name not in MAIN]


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _percent(share: float | None) -> str:
    return "not known" if share is None else f"{100 * share:.1f} %"


def _by_version(accuracies: dict[str, float]) -> str:
    """Of the first version and the last, in words."""
    return " to ".join(f"{accuracy:.3f} (version {version})" for version, accuracy in accuracies.items())
