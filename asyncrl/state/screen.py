"""The picture of a run on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncrl.config.stream_capacity import CHECKPOINT_SHARE
from asyncrl.state.records import counted, duration
from asyncrl.state.status import curve
from asyncrl.state.summary import own_metrics
from topics.roles import ROLE_NAMES, role_of
from topics.runs import PoolStatus, RunStatus, ScalingStatus
from topics.topic import EVALUATIONS

_BLOCKS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BAR = 14  # cells of a bar
_SPARK = 24  # cells of a curve: with its label and its figures a line fits into 80
_GAP = "   "  # between two pieces of a line
_ENGINES = 6  # that are shown one by one
_STATES = {
    "starting": "yellow",
    "running": "green",
    "paused": "yellow",
    "stopping": "yellow",
    "finished": "green",
    "stopped": "yellow",
    "failed": "bold red",
    "crashed": "bold red",
}
_OVER = ("finished", "stopped", "failed", "crashed")
# On a low terminal, in this order.
_LEFT_OUT = ("streams", "groups", "learner", "answers", "metrics", "queues", "engines")


class _Pieces:
    """Pieces of markup, on as many lines as needed; a piece is broken only if it is longer than a line."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = [Text.from_markup(piece, overflow="fold") for piece in pieces]

    def __rich_measure__(self, _console: Console, options: ConsoleOptions) -> Measurement:
        widths = [piece.cell_len for piece in self._pieces]
        return Measurement(max(widths), sum(widths) + len(_GAP) * (len(widths) - 1)).with_maximum(options.max_width)

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        line = self._pieces[0].copy()
        for piece in self._pieces[1:]:
            if line.cell_len + len(_GAP) + piece.cell_len > options.max_width:
                yield line
                line = piece.copy()
            else:
                line.append(_GAP).append_text(piece)
        yield line


class _Fitting:
    """The first of several pictures, the fullest first, that is no higher than the terminal; elsewhere the fullest."""

    def __init__(self, pictures: Sequence[RenderableType]) -> None:
        self._pictures = pictures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.size.height - 1  # the cursor has a separate line below it
        fitting = (shown for shown in self._pictures if len(console.render_lines(shown, options, pad=False)) <= room)
        yield next(fitting, self._pictures[-1]) if console.is_terminal else self._pictures[0]


def render(status: RunStatus, width: int | None = None) -> RenderableType:
    """A panel with the state of a run, `width` cells wide: everything, or the rows that fit a lower terminal."""
    facts = {name: pieces for name, pieces in _facts(status).items() if pieces}
    live = bool(status.actors) and status.state not in _OVER
    tables = [_fleet(status)] if live else []
    pictures = [_panel(status, width, facts, ["", *tables] if live else [], 1), _panel(status, width, facts, tables, 0)]
    if live:
        facts["actors"] = _fleet_in_short(status)
    for left_out in (None, *_LEFT_OUT):
        facts = {name: pieces for name, pieces in facts.items() if name != left_out}
        pictures.append(_panel(status, width, facts, [], 0))
    return _Fitting(pictures)


def _panel(
    status: RunStatus, width: int | None, facts: dict[str, list[str]], tables: Sequence[RenderableType], blank: int
) -> Panel:
    """One of the pictures, with this many blank lines at its edges."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", style="dim", no_wrap=True, min_width=8)  # labels stay whole
    grid.add_column()
    for name, pieces in facts.items():
        grid.add_row(name, _Pieces(pieces))
    troubles = (
        (status.trajectories_failed, "trajectory", "failed", status.last_failure),
        (status.messages_unreadable, "message", "rejected", status.last_unreadable),
    )
    warnings = [f"{counted(count, noun)} {fate}; last: {last}" for count, noun, fate, last in troubles if count]
    warnings += [f"alert {alert.alert}: since step {alert.step:,}" for alert in status.alerts]
    warnings += [f"{stall.cause}: {stall.object}: {stall.evidence}" for stall in status.stalls]
    warnings += [f"autoscale.function: {status.autoscale_fault}"] if status.autoscale_fault else []
    shown = [Text(f"▲ {one}", style="yellow", overflow="fold") for one in (*warnings, status.failure) if one]
    return Panel(
        Padding(Group(grid, *tables, *shown), (blank, 1)),
        title=f"[dim] asyncrl [/][bold]{status.run} [/]",
        title_align="left",
        subtitle=f"[{_STATES[status.state]}] {status.state} [/][dim]· {duration(status.elapsed_s)} [/]",
        subtitle_align="right",
        border_style="bright_black",
        width=width,
    )


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


def _facts(status: RunStatus) -> dict[str, list[str]]:
    """Return a figure by its label, as pieces of markup; empty if it is unknown."""
    groups = {"open": status.open_groups, "ready": status.ready_groups}
    groups |= {f"dropped for {reason}": count for reason, count in status.groups_dropped.items()}
    metrics, answers = status.metrics, dict[str, str]()
    if "response_length/mean" in metrics:
        answers["tokens mean"] = f"{metrics['response_length/mean']:,.0f}"
        answers["truncated"] = f"{100 * metrics['truncated_share']:.0f} %"
    if answers and "flat_groups_share" in metrics:
        answers["flat groups"] = f"{100 * metrics['flat_groups_share']:.0f} %"
    spent = {
        "s training": metrics.get("train_s"),
        "s waiting": metrics.get("wait_s"),
        "s from issue to grade": metrics.get("issue_to_grade_s_mean"),
    }
    speed = {
        "tokens/s sampled": status.per_s.get("sampled_tokens"),
        "tokens/s trained": status.per_s.get("trained_tokens"),
        "trajectories/s": status.per_s.get("trajectories"),
        "steps/s": status.per_s.get("steps"),
    }
    return {
        "step": _progress(status),
        "reward": [] if status.reward is None else [f"{_curve(status.rewards)}  [bold]{status.reward:.3f}[/]"],
        "accuracy": _evals(status),
        "answers": _cells(answers),
        "metrics": _cells({name.removeprefix("reward/"): f"{value:.3f}" for name, value in own_metrics(metrics)}),
        "judges": [] if status.judge_agreement is None else [f"[bold]{status.judge_agreement:.0%}[/] agree with users"],
        "lag": _lag(status),
        "speed": _cells({what: _rounded(value) for what, value in speed.items() if value is not None}),
        "learner": _cells({what: _rounded(value) for what, value in spent.items() if value is not None}),
        "queues": [
            f"[dim]{role}[/] [bold]{queue['waiting']}[/] waiting [bold]{queue['under_way']}[/] under way"
            for role, queue in status.queues.items()
            if role_of(role) in ("rollout", "reward") and not role.endswith(EVALUATIONS)
        ],
        "groups": _cells({what: f"{value:,.0f}" for what, value in groups.items() if value is not None}),
        "requests": _requests(status),
        "streams": _streams(status),
        "engines": _engines(status),
        **{f"scaled {scaled.pool}": _scaled(scaled, status.at_s) for scaled in status.scalings},
    }


def _requests(status: RunStatus) -> list[str]:
    """Return what the gateways count since each began: requests are turns there."""
    vitals = [actor.vitals for actor in status.actors if actor.role == "gateway" and actor.vitals]
    names = {"turns": "answered", "turns_failed": "failed", "requests_refused": "refused", "clients_gone": "left"}
    counts = {what: sum(values.get(name, 0.0) for values in vitals) for name, what in names.items()}
    return _cells(
        {what: f"{count:,.0f}" for what, count in counts.items() if count or what == "answered"} if vitals else {}
    )


def _cells(values: dict[str, str]) -> list[str]:
    return [f"[bold]{value}[/] {escape(what)}" for what, value in values.items()]


def _rounded(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _curve(values: Sequence[float]) -> str:
    return f"[cyan]{sparkline(values, _SPARK):{_SPARK}}[/]"


def _progress(status: RunStatus) -> list[str]:
    if status.step is None:
        return ["[dim]no step yet[/]"] if (status.wanted or {"learner": 1}).get("learner") else []
    warm = status.stage == "warmup"
    done, total = (status.step + status.warmup_steps, status.warmup_steps) if warm else (status.step, status.steps)
    text = f"[cyan]{bar(done / total, _SPARK):{_SPARK}}[/]  " if total else ""
    pieces = [f"{text}[bold]{done:,}[/]" + (f" of {total:,}" if total else ""), *(["of warm-up"] if warm else [])]
    if status.version is not None:
        lineage = f" of lineage {status.lineage}" if status.lineage else ""
        pieces.append(f"[dim]version {status.version}{lineage}[/]")
    saved = status.checkpoint_step
    if saved is not None:
        place = f"{saved:,}" if saved >= 0 else f"{saved + status.warmup_steps:,} of warm-up"
        pieces.append(f"[dim]checkpoint {place}[/]")
    return pieces


def _evals(status: RunStatus) -> list[str]:
    shown = [f"[dim]v{scored.version}[/] [bold]{scored.accuracy:.3f}[/]" for scored in status.evals]
    return shown if len(shown) <= 4 else [f"{shown[0]} …", *shown[-3:]]


def _lag(status: RunStatus) -> list[str]:
    if status.mean_lag_versions is None:
        return []
    lags = status.recent_tokens_by_lag
    shares = {lag: tokens / sum(lags.values()) for lag, tokens in list(lags.items())[:6]}
    bars = [f"[dim]{lag}[/] [cyan]{bar(share, _BAR)}[/] {100 * share:.0f} %" for lag, share in shares.items()]
    return [f"[bold]{status.mean_lag_versions:.2f}[/] [dim]mean[/]", *bars]


def _streams(status: RunStatus) -> list[str]:
    shown = []
    for name, fill in status.streams.items():
        style = "yellow" if fill.share > CHECKPOINT_SHARE else "default"
        used, share = f"[bold]{fill.bytes / 1e6:,.1f}[/]", f"[{style}]{100 * fill.share:.0f} %[/]"
        room = f"{used} of {fill.max_bytes / 1e6:,.0f} MB {share}" if fill.max_bytes > 0 else f"{used} MB"
        shown.append(f"[dim]{name.lower()}[/] {room}")
    if status.trims:
        shown.append(f"[bold]{status.trimmed_bytes / 1e6:,.1f} MB[/] trimmed in {status.trims:,}")
    if status.admission_paused:
        shown.append("[yellow]admission paused[/]")
    return shown


def _engines(status: RunStatus) -> list[str]:
    shown = []
    for engine in status.engines[:_ENGINES]:
        colour, state = ("green", "") if engine.state == "ready" else ("yellow", f" {engine.state}")
        version = "" if engine.version is None else f" [bold]v{engine.version}[/]"
        shown.append(f"[{colour}]●[/] [dim]{engine.engine_id}[/]{version}{state}")
    more = len(status.engines) - _ENGINES
    return [*shown, f"[dim]and {more} more[/]"] if more > 0 else shown


def _scaled(scaled: ScalingStatus, now_s: float) -> list[str]:
    """`2 to 4 by autoscale 0:42 ago: 130 wait for 512 places`, and why the rule does not change it now."""
    shown = []
    if scaled.at_s is not None:
        why = f": {escape(scaled.reason)}" if scaled.reason else ""
        shown.append(
            f"[bold]{scaled.before} to {scaled.after}[/] by {scaled.by} {duration(now_s - scaled.at_s)} ago{why}"
        )
    shown += [f"[dim]{escape(scaled.held)}[/]"] if scaled.held else []
    return shown


def _fleet(status: RunStatus) -> Table:
    """One row per pool of processes: how many live, of how many wanted, how busy, how often started again."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    table.add_column("actors", no_wrap=True)
    table.add_column("live", justify="right", no_wrap=True)
    table.add_column("cores", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for name, wanted, pool in _pools(status):
        _add_pool(table, name, wanted, pool)
    for share in [actor.vitals["nats_cpu_share"] for actor in status.actors if "nats_cpu_share" in actor.vitals][:1]:
        table.add_row("nats", "", f"{share:.2f}", Text(bar(share, _BAR), style="cyan"))
    return table


def _pools(status: RunStatus) -> list[tuple[str, int, PoolStatus]]:
    """Return each pool that has processes, how many are wanted, and its state, in the order of a trajectory's way."""
    way, nothing = ROLE_NAMES, PoolStatus(0, 0.0, 0, 0, "")
    pools = {*status.wanted, *status.pools}
    ordered = sorted(pools, key=lambda pool: (way.index(role_of(pool)) if role_of(pool) in way else len(way), pool))
    return [
        (pool, status.wanted.get(pool, 1), status.pools.get(pool, nothing))
        for pool in ordered
        if status.wanted.get(pool, 1)
    ]


def _fleet_in_short(status: RunStatus) -> list[str]:
    """Return the number of living actors and their usage, with the pools that lack some."""
    pools = [(name, wanted, pool.live) for name, wanted, pool in _pools(status)]
    cores = sum(pool.cores for pool in status.pools.values())
    lacking = [f"[yellow]{pool} {live} of {wanted}[/]" for pool, wanted, live in pools if live < wanted]
    return [f"[bold]{sum(live for _, _, live in pools)}[/] live", f"[bold]{cores:.2f}[/] cores", *lacking]


def _add_pool(table: Table, name: str, wanted: int, pool: PoolStatus) -> None:
    notes = [f"[cyan]{bar(pool.cores / max(1, pool.live), _BAR):{_BAR}}[/]"]
    notes += [f"[yellow]{pool.silent} silent[/]"] if pool.silent else []
    notes += [f"[yellow]{counted(pool.restarts, 'restart')}[/]"] if pool.restarts else []
    notes += [f"[dim]{escape(pool.last_error)}[/]"] if pool.last_error else []
    count = str(pool.live) if pool.live == wanted else f"[yellow]{pool.live} of {wanted}[/]"
    table.add_row(name, Text.from_markup(count), f"{pool.cores:.2f}", Text.from_markup(" ".join(notes)))
