"""The picture of a run on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.config.room import CHECKPOINT_SHARE
from asyncrl.state.run_state import RunState
from asyncrl.state.status import curve
from asyncrl.state.summary import own_metrics
from topics.roles import ROLE_NAMES, SUPERVISOR

_BLOCKS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BAR = 14  # cells of a bar
_SPARK = 24  # cells of a curve: with its label and its figures a line fits into 80
_SILENT_S = 10.0  # an actor without vital signs for this long is shown as silent
_STATES = {
    "starting": "yellow",
    "running": "green",
    "stopping": "yellow",
    "finished": "green",
    "stopped": "yellow",
    "failed": "bold red",
    "crashed": "bold red",
}


def render(state: RunState, now_ns: int, width: int | None = None) -> RenderableType:
    """A panel with everything that is known of a run at a time of the server's clock, `width` cells wide."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(justify="right", style="dim", no_wrap=True, min_width=8)  # labels stay whole
    facts.add_column(no_wrap=True, overflow="ellipsis")
    for name, value in (
        ("step", _progress(state)),
        ("reward", _reward(state)),
        ("accuracy", _evals(state)),
        ("answers", _answers(state)),
        ("metrics", _metrics(state)),
        ("lag", _lag(state)),
        ("speed", _speed(state)),
        ("learner", _learner(state)),
        ("queues", _queues(state)),
        ("groups", _groups(state)),
        ("streams", _streams(state)),
        ("engines", _engines(state)),
    ):
        if value is not None:
            facts.add_row(name, value)
    parts: list[RenderableType] = [facts]
    if state.actors and not state.over:
        parts += ["", _fleet(state, now_ns)]
    warnings = [str(trouble) for trouble in (state.failed, state.dead) if trouble.count]
    warnings += [f"{stall.cause}: {stall.object}: {stall.evidence}" for stall in state.stalls.values()]
    if state.failure:
        warnings.append(state.failure)
    parts += [Text(f"▲ {warning}", style="yellow", overflow="ellipsis", no_wrap=True) for warning in warnings]
    return Panel(
        Padding(Group(*parts), (1, 1)),
        title=Text.assemble((" asyncrl ", "dim"), (f"{state.run} ", "bold")),
        title_align="left",
        subtitle=Text.assemble(
            (f" {state.phase} ", _STATES[state.phase]), (f"· {duration((now_ns - state.first_ns) / 1e9)} ", "dim")
        )
        if state.first_ns
        else Text(f" {state.phase} ", "yellow"),
        subtitle_align="right",
        border_style="bright_black",
        width=width,
    )


def duration(seconds: float) -> str:
    """`0:42`, `1:02:03`."""
    whole = max(0, int(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in block characters between 0 (or the smallest value) and 1 (or the greatest): the mean of each cell."""
    if not values:
        return ""
    low, high = min(0.0, *values), max(1.0, *values)
    means = curve(values, width)
    return "".join(_BLOCKS[1 + round((mean - low) / (high - low) * (len(_BLOCKS) - 2))] for mean in means)


def bar(share: float, width: int) -> str:
    """A horizontal bar of `width` cells at most, in eighths of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).strip()


def _progress(state: RunState) -> RenderableType:
    newest = state.newest
    if newest is None:
        return Text("no step yet", style="dim")
    if newest.stage == "warmup":
        done, total, name = newest.step + state.warmup_steps, state.warmup_steps, "of warm-up"
    else:
        done, total, name = newest.step, state.total, ""
    text = Text.assemble((f"{done:,}", "bold"), (f" of {total:,} {name}".rstrip() if total else "", ""))
    if state.version is not None:
        lineage = f" of lineage {state.lineage}" if state.lineage else ""
        text.append(f"   version {state.version}{lineage}", style="dim")
    if state.checkpoint is not None:
        text.append(f"   checkpoint {state.checkpoint}", style="dim")
    if not total:
        return text
    row = Table.grid(padding=(0, 2))
    row.add_column(no_wrap=True)
    row.add_column(no_wrap=True, overflow="ellipsis")
    row.add_row(ProgressBar(total=total, completed=done, width=_SPARK, complete_style="cyan"), text)
    return row


def _reward(state: RunState) -> RenderableType | None:
    if not state.rewards:
        return None
    return Text.assemble(
        (sparkline(state.rewards, _SPARK).ljust(_SPARK), "cyan"), "  ", (f"{state.rewards[-1]:.3f}", "bold")
    )


def _evals(state: RunState) -> RenderableType | None:
    if not state.evals:
        return None
    text = Text()
    shown = state.evals if len(state.evals) <= 4 else [state.evals[0], *state.evals[-3:]]
    for number, scored in enumerate(shown):
        text.append(" … " if number == 1 and len(shown) < len(state.evals) else "   " if number else "")
        text.append(f"v{scored.version} ", style="dim").append(f"{scored.accuracy:.3f}", style="bold")
    return text


def _answers(state: RunState) -> RenderableType | None:
    figures = state.figures
    if "response_tokens_mean" not in figures:
        return None
    found = [(f"{figures['response_tokens_mean']:,.0f}", "tokens mean")]
    found.append((f"{100 * figures['truncated_share']:.0f} %", "truncated"))
    if (flat := figures.get("flat_groups_share")) is not None:
        found.append((f"{100 * flat:.0f} %", "flat groups"))
    return _listed(found)


def _metrics(state: RunState) -> RenderableType | None:
    """Return what the reward gave beside itself."""
    own = [(f"{value:.3f}", name.removeprefix("reward/")) for name, value in own_metrics(state.figures)]
    return _listed(own) if own else None


def _learner(state: RunState) -> RenderableType | None:
    names = {"train_s": "s training", "wait_s": "s waiting", "issue_to_grade_s_mean": "s from issue to grade"}
    found = state.metrics
    return _listed([(f"{found[key]:,.{_digits(found[key])}f}", names[key]) for key in names if key in found]) or None


def _lag(state: RunState) -> RenderableType | None:
    lags, mean = state.lags, state.mean_lag
    if mean is None:
        return None
    total = sum(lags.values())
    text = Text.assemble((f"{mean:.2f}", "bold"), (" mean", "dim"))
    for lag, tokens in list(lags.items())[:6]:
        share = tokens / total
        text.append(f"   {lag} ", style="dim").append(bar(share, _BAR), style="cyan").append(f" {100 * share:.0f} %")
    return text


def _speed(state: RunState) -> RenderableType | None:
    rates = state.rates()
    names = {
        "sampled_tokens": "tokens/s sampled",
        "trained_tokens": "tokens/s trained",
        "trajectories": "trajectories/s",
        "steps": "steps/s",
    }
    if not rates:
        return None
    return _listed([(f"{rates[key]:,.{_digits(rates[key])}f}", what) for key, what in names.items() if key in rates])


def _queues(state: RunState) -> RenderableType | None:
    if not state.queues:
        return None
    text = Text()
    for number, role in enumerate(("rollout", "reward")):
        queue = state.queues[role]
        text.append("   " if number else "").append(f"{role} ", style="dim")
        text.append(f"{queue['waiting']:,}", style="bold").append(" waiting ")
        text.append(f"{queue['under_way']:,}", style="bold").append(" under way")
    return text


def _groups(state: RunState) -> RenderableType | None:
    found = [
        (gauge, what)
        for gauge, what in (
            (state.gauge("prompter", "open_groups"), "open"),
            (state.gauge("buffer", "ready_groups"), "ready"),
        )
        if gauge is not None
    ]
    return _listed([(f"{gauge:,.0f}", what) for gauge, what in found]) if found else None


def _streams(state: RunState) -> RenderableType | None:
    if not state.streams:
        return None
    text = Text()
    for name, fill in state.payloads.items():
        text.append("   " if text else "").append(f"{name.lower()} ", style="dim")
        text.append(f"{fill.bytes / 1e6:,.1f}", style="bold").append(f" of {fill.max_bytes / 1e6:,.0f} MB")
        text.append(f" {100 * fill.share:.0f} %", style="yellow" if fill.share > CHECKPOINT_SHARE else "")
    if state.trims:
        text.append(f"   {state.trimmed_bytes / 1e6:,.1f} MB", style="bold").append(f" trimmed in {state.trims:,}")
    if state.paused:
        text.append("   admission paused", style="yellow")
    return text


def _engines(state: RunState) -> RenderableType | None:
    shown = [engine for _, engine in sorted(state.engines.items()) if engine.state != "gone"]
    if not shown:
        return None
    text = Text()
    for engine in shown[:6]:
        colour = "green" if engine.state == "ready" else "yellow"
        text.append("● ", style=colour).append(engine.engine_id, style="dim").append(f" v{engine.shown}", style="bold")
        text.append(f" {engine.state}   " if engine.state != "ready" else "   ")
    if len(shown) > 6:
        text.append(f"and {len(shown) - 6} more", style="dim")
    return text


def _fleet(state: RunState, now_ns: int) -> Table:
    """One row per role: how many live, of how many wanted, how busy, how often started again."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    table.add_column("actors")
    table.add_column("live", justify="right")
    table.add_column("cores", justify="right")
    table.add_column("", no_wrap=True)
    for role in sorted({*state.wanted, *(actor.role for actor in state.fleet)}, key=_order):
        if not state.wanted.get(role, 1):
            continue
        actors = [actor for actor in state.fleet if actor.role == role]
        live = [actor for actor in actors if actor.live]
        wanted = state.wanted.get(role, 1)
        cores = sum(actor.gauge("cpu_share") or 0.0 for actor in live)
        silent = [actor for actor in live if actor.seen_ns and now_ns - actor.seen_ns > _SILENT_S * 1e9]
        restarts = sum(actor.restarts for actor in actors)
        note = Text()
        if silent:
            note.append(f"{len(silent)} silent ", style="yellow")
        if restarts:
            note.append(f"{restarts} restart{'s' if restarts > 1 else ''} ", style="yellow")
        last = next((actor.error for actor in actors if actor.error), "")
        note.append(last, style="dim")
        count = str(len(live)) if len(live) == wanted else f"{len(live)} of {wanted}"
        table.add_row(
            role,
            Text(count, style="" if len(live) == wanted else "yellow"),
            f"{cores:.2f}",
            Text.assemble((bar(cores / max(1, len(live)), _BAR).ljust(_BAR), "cyan"), " ", note),
        )
    server = state.gauge(SUPERVISOR, "nats_cpu_share")
    if server is not None:
        table.add_row("nats", "", f"{server:.2f}", Text(bar(server, _BAR), style="cyan"))
    return table


def _listed(values: Sequence[tuple[str, str]]) -> Text:
    text = Text()
    for number, (value, what) in enumerate(values):
        text.append("   " if number else "").append(value, style="bold").append(f" {what}")
    return text


def _digits(value: float) -> int:
    return 0 if value >= 100 else 1 if value >= 10 else 2


def _order(role: str) -> tuple[int, str]:
    """Along the way of a trajectory."""
    way = ROLE_NAMES
    return (way.index(role) if role in way else len(way), role)
