"""The picture of a run on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.cli.summary import own_metrics
from asyncrl.config.room import CHECKPOINT_SHARE
from asyncrl.state.view import RunView
from topics.roles import ROLE_NAMES

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


def render(view: RunView, now_ns: int, width: int | None = None) -> RenderableType:
    """A panel with everything that is known of a run at a time of the server's clock, `width` cells wide."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(justify="right", style="dim", no_wrap=True, min_width=8)  # labels stay whole
    facts.add_column(no_wrap=True, overflow="ellipsis")
    for name, value in (
        ("step", _progress(view)),
        ("reward", _reward(view)),
        ("accuracy", _evals(view)),
        ("answers", _answers(view)),
        ("metrics", _metrics(view)),
        ("lag", _lag(view)),
        ("speed", _speed(view)),
        ("learner", _learner(view)),
        ("queues", _queues(view)),
        ("groups", _groups(view)),
        ("streams", _streams(view)),
        ("engines", _engines(view)),
    ):
        if value is not None:
            facts.add_row(name, value)
    parts: list[RenderableType] = [facts]
    if view.actors and not view.over:
        parts += ["", _fleet(view, now_ns)]
    warnings = [str(trouble) for trouble in (view.failed, view.dead) if trouble.count]
    warnings += [f"{stall.cause}: {stall.object}: {stall.evidence}" for stall in view.stalls.values()]
    if view.failure:
        warnings.append(view.failure)
    parts += [Text(f"▲ {warning}", style="yellow", overflow="ellipsis", no_wrap=True) for warning in warnings]
    return Panel(
        Padding(Group(*parts), (1, 1)),
        title=Text.assemble((" asyncrl ", "dim"), (f"{view.run} ", "bold")),
        title_align="left",
        subtitle=Text.assemble(
            (f" {view.state} ", _STATES[view.state]), (f"· {duration((now_ns - view.first_ns) / 1e9)} ", "dim")
        )
        if view.first_ns
        else Text(f" {view.state} ", "yellow"),
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
    cells = min(width, len(values))
    bounds = [len(values) * cell // cells for cell in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    return "".join(_BLOCKS[1 + round((mean - low) / (high - low) * (len(_BLOCKS) - 2))] for mean in means)


def bar(share: float, width: int) -> str:
    """A horizontal bar of `width` cells at most, in eighths of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).strip()


def _progress(view: RunView) -> RenderableType:
    newest = view.step
    if newest is None:
        return Text("no step yet", style="dim")
    if newest.stage == "warmup":
        done, total, name = newest.step + view.warmup_steps, view.warmup_steps, "of warm-up"
    else:
        done, total, name = newest.step, view.total, ""
    text = Text.assemble((f"{done:,}", "bold"), (f" of {total:,} {name}".rstrip() if total else "", ""))
    if view.version is not None:
        lineage = f" of lineage {view.lineage}" if view.lineage else ""
        text.append(f"   version {view.version}{lineage}", style="dim")
    if view.checkpoint is not None:
        text.append(f"   checkpoint {view.checkpoint}", style="dim")
    if not total:
        return text
    row = Table.grid(padding=(0, 2))
    row.add_column(no_wrap=True)
    row.add_column(no_wrap=True, overflow="ellipsis")
    row.add_row(ProgressBar(total=total, completed=done, width=_SPARK, complete_style="cyan"), text)
    return row


def _reward(view: RunView) -> RenderableType | None:
    if not view.rewards:
        return None
    return Text.assemble(
        (sparkline(view.rewards, _SPARK).ljust(_SPARK), "cyan"), "  ", (f"{view.rewards[-1]:.3f}", "bold")
    )


def _evals(view: RunView) -> RenderableType | None:
    if not view.evals:
        return None
    text = Text()
    shown = view.evals if len(view.evals) <= 4 else [view.evals[0], *view.evals[-3:]]
    for number, scored in enumerate(shown):
        text.append(" … " if number == 1 and len(shown) < len(view.evals) else "   " if number else "")
        text.append(f"v{scored.version} ", style="dim").append(f"{scored.accuracy:.3f}", style="bold")
    return text


def _answers(view: RunView) -> RenderableType | None:
    figures = view.figures
    if "response_tokens_mean" not in figures:
        return None
    found = [(f"{figures['response_tokens_mean']:,.0f}", "tokens mean")]
    found.append((f"{100 * figures['truncated_share']:.0f} %", "truncated"))
    if (flat := figures.get("flat_groups_share")) is not None:
        found.append((f"{100 * flat:.0f} %", "flat groups"))
    return _listed(found)


def _metrics(view: RunView) -> RenderableType | None:
    """Return what the reward gave beside itself."""
    own = [(f"{value:.3f}", name.removeprefix("reward/")) for name, value in own_metrics(view.figures)]
    return _listed(own) if own else None


def _learner(view: RunView) -> RenderableType | None:
    names = {"train_s": "s training", "wait_s": "s waiting", "issue_to_grade_s_mean": "s from issue to grade"}
    found = view.metrics
    return _listed([(f"{found[key]:,.{_digits(found[key])}f}", names[key]) for key in names if key in found]) or None


def _lag(view: RunView) -> RenderableType | None:
    lags, mean = view.lags, view.mean_lag
    if mean is None:
        return None
    total = sum(lags.values())
    text = Text.assemble((f"{mean:.2f}", "bold"), (" mean", "dim"))
    for lag, tokens in list(lags.items())[:6]:
        share = tokens / total
        text.append(f"   {lag} ", style="dim").append(bar(share, _BAR), style="cyan").append(f" {100 * share:.0f} %")
    return text


def _speed(view: RunView) -> RenderableType | None:
    rates = view.rates()
    names = {
        "sampled_tokens": "tokens/s sampled",
        "trained_tokens": "tokens/s trained",
        "trajectories": "trajectories/s",
        "steps": "steps/s",
    }
    if not rates:
        return None
    return _listed([(f"{rates[key]:,.{_digits(rates[key])}f}", what) for key, what in names.items() if key in rates])


def _queues(view: RunView) -> RenderableType | None:
    if not view.queues:
        return None
    text = Text()
    for number, role in enumerate(("rollout", "reward")):
        state = view.queues[role]
        text.append("   " if number else "").append(f"{role} ", style="dim")
        text.append(f"{state['waiting']:,}", style="bold").append(" waiting ")
        text.append(f"{state['under_way']:,}", style="bold").append(" under way")
    return text


def _groups(view: RunView) -> RenderableType | None:
    found = [
        (gauge, what)
        for gauge, what in (
            (view.gauge("prompter", "open_groups"), "open"),
            (view.gauge("buffer", "ready_groups"), "ready"),
        )
        if gauge is not None
    ]
    return _listed([(f"{gauge:,.0f}", what) for gauge, what in found]) if found else None


def _streams(view: RunView) -> RenderableType | None:
    if not view.streams:
        return None
    text = Text()
    for name, filled in view.streams.items():
        text.append("   " if text else "").append(f"{name.lower()} ", style="dim")
        text.append(f"{filled.bytes / 1e6:,.1f}", style="bold").append(f" of {filled.max_bytes / 1e6:,.0f} MB")
        text.append(f" {100 * filled.share:.0f} %", style="yellow" if filled.share > CHECKPOINT_SHARE else "")
    if view.trims:
        text.append(f"   {view.trimmed_bytes / 1e6:,.1f} MB", style="bold").append(f" trimmed in {view.trims:,}")
    if view.paused:
        text.append("   admission paused", style="yellow")
    return text


def _engines(view: RunView) -> RenderableType | None:
    if not view.engines:
        return None
    text = Text()
    shown = sorted(view.engines.values())
    for engine in shown[:6]:
        colour = "green" if engine.state == "ready" else "yellow"
        text.append("● ", style=colour).append(engine.engine_id, style="dim").append(
            f" v{engine.version}", style="bold"
        )
        text.append(f" {engine.state}   " if engine.state != "ready" else "   ")
    if len(shown) > 6:
        text.append(f"and {len(shown) - 6} more", style="dim")
    return text


def _fleet(view: RunView, now_ns: int) -> Table:
    """One row per role: how many live, of how many wanted, how busy, how often started again."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    table.add_column("actors")
    table.add_column("live", justify="right")
    table.add_column("cores", justify="right")
    table.add_column("", no_wrap=True)
    for role in sorted({*view.wanted, *(actor.role for actor in view.fleet)}, key=_order):
        if not view.wanted.get(role, 1):
            continue
        actors = [actor for actor in view.fleet if actor.role == role]
        live = [actor for actor in actors if actor.live]
        wanted = view.wanted.get(role, 1)
        cores = sum(actor.vitals.get("cpu_share", 0.0) for actor in live)
        silent = [actor for actor in live if actor.seen_ns and now_ns - actor.seen_ns > _SILENT_S * 1e9]
        restarts = sum(actor.restarts for actor in actors)
        note = Text()
        if silent:
            note.append(f"{len(silent)} silent ", style="yellow")
        if restarts:
            note.append(f"{restarts} restart{'s' if restarts > 1 else ''} ", style="yellow")
        last = next((actor.last_error for actor in actors if actor.last_error), "")
        note.append(last, style="dim")
        count = str(len(live)) if len(live) == wanted else f"{len(live)} of {wanted}"
        table.add_row(
            role,
            Text(count, style="" if len(live) == wanted else "yellow"),
            f"{cores:.2f}",
            Text.assemble((bar(cores / max(1, len(live)), _BAR).ljust(_BAR), "cyan"), " ", note),
        )
    server = [actor.vitals["nats_cpu_share"] for actor in view.actors.values() if "nats_cpu_share" in actor.vitals]
    if server:
        share = Text(bar(server[-1], _BAR), style="cyan")
        table.add_row("nats", "", f"{server[-1]:.2f}", share)
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
