"""The closing words of a run."""

from __future__ import annotations

from typing import Any


def summary_text(summary: dict[str, Any]) -> str:
    """A run's figures for people."""
    lags = summary["trained_tokens_by_lag"]
    total = sum(lags.values()) or 1
    histogram = "  ".join(f"lag {lag}: {count:,} ({100 * count / total:.0f} %)" for lag, count in lags.items())
    rows = [
        ("sampled reward", _change(summary["sampled_reward_first_step"], summary["sampled_reward_last_5_steps"])),
        ("greedy accuracy", _change(summary["greedy_accuracy_before"], summary["greedy_accuracy_after"])),
        ("steps", f"{summary['steps']} of RL after {summary['warmup_steps']} of warm-up"),
        (
            "trajectories",
            f"{summary['trajectories_trained']:,} trained of {summary['trajectories_issued']:,} issued, "
            f"{summary['trajectories_failed']:,} failed",
        ),
        ("tokens", f"{summary['trained_tokens']:,} trained of {summary['sampled_tokens']:,} sampled"),
        ("lag", histogram or "no trained token"),
        ("wasted tokens", _percent(summary["wasted_token_share"])),
        ("wall time", f"{summary['wall_s']} s, of which RL {summary['rl_wall_s']} s"),
        ("metrics", summary["metrics"]),
        ("plot", summary.get("plot", "none")),
        ("model", summary["exported_model"] or "not exported: the run was stopped"),
    ]
    return "\n".join(f"{name:>16}  {value}" for name, value in rows)


def _change(before: float | None, after: float | None) -> str:
    return f"{_number(before)} before, {_number(after)} after"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _percent(share: float | None) -> str:
    return "not known" if share is None else f"{100 * share:.1f} %"
