"""The screen of `asyncrl top`: one table at a time, sorted and filtered by keys."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from asyncrl.state.records import duration
from asyncrl.state.top_rows import COLUMNS, TABLES, Cell, Facts, TableName, cell_text
from asyncrl.telemetry.printable import printable

_SORTED: dict[TableName, tuple[int, bool]] = {  # column at the start, and whether its greatest value is first
    "actors": (2, True),
    "engines": (0, False),
    "trajectories": (1, True),
    "waits": (1, True),
    "findings": (0, False),
    "logs": (0, False),
}
_STYLES = {
    **dict.fromkeys(("live", "ready", "running", "finished"), "green"),
    **dict.fromkeys(("silent", "paused", "updating", "starting", "stopping", "stopped", "warning", "alert"), "yellow"),
    **dict.fromkeys(("down", "failed", "crashed", "error", "critical"), "red"),
}
_EDGES = 4  # lines above and below the rows: the run, the tables, names of columns, keys
UP, DOWN, PAGE_UP, PAGE_DOWN = "\x1b[A", "\x1b[B", "\x1b[5~", "\x1b[6~"
_BACK = ("\x7f", "\x08")


class TopScreen:
    """The chosen table with its order and filter, and the keys that change them."""

    def __init__(self, facts: Facts, table: TableName = "actors", filter_text: str = "") -> None:
        self.facts = facts
        self.table = table
        self.filter = filter_text
        self.typing = False  # a filter
        self.closed = False
        self._order = dict(_SORTED)
        self._offset = 0
        self._page = 1

    def press(self, key: str) -> None:
        """Obey a key."""
        if self.typing:
            self._type(key)
        elif key in ("q", "\x03"):
            self.closed = True
        elif key == "/":
            self.typing, self.filter = True, ""
        elif key in "123456":
            self.table, self._offset = TABLES[int(key) - 1], 0
        elif key == "\t":
            self.table, self._offset = TABLES[(TABLES.index(self.table) + 1) % len(TABLES)], 0
        elif key in ("s", "r"):
            column, descends = self._order[self.table]
            further = (column + 1) % len(COLUMNS[self.table])
            self._order[self.table] = (further, descends) if key == "s" else (column, not descends)
        else:
            moves = {UP: -1, "k": -1, DOWN: 1, "j": 1, PAGE_UP: -self._page, PAGE_DOWN: self._page, " ": self._page}
            self._offset = max(0, self._offset + moves.get(key, 0))

    def _type(self, key: str) -> None:
        if key in ("\r", "\n"):
            self.typing = False
        elif key == "\x1b":
            self.typing, self.filter = False, ""
        elif key in _BACK:
            self.filter = self.filter[:-1]
        elif key.isprintable():
            self.filter += key
        self._offset = 0

    def render(self, width: int, height: int) -> RenderableType:
        """Return the picture for a terminal of this size, in cells."""
        rows = self._ordered()
        self._page = max(1, height - _EDGES)
        last = max(0, len(rows) - self._page)
        self._offset = min(self._offset, last)
        newest = self.table == "logs" and not self._offset
        first = last if newest else self._offset
        shown = rows[first : first + self._page]
        return Group(self._headline(width), self._tabs(), self._grid(shown, width), self._keys(len(shown), len(rows)))

    def _ordered(self) -> list[tuple[str, ...]]:
        """Return the texts of the rows that the filter passes, in their order."""
        columns = COLUMNS[self.table]
        number, descends = self._order[self.table]
        rows = self.facts.rows(self.table)
        if not self.filter and self.table != "logs":
            rows.sort(key=lambda row: _rank(row[number]), reverse=descends)
            return [tuple(map(cell_text, columns, row)) for row in rows]
        found = [(row, tuple(map(cell_text, columns, row))) for row in rows]
        wanted = self.filter.lower()
        found = [one for one in found if any(wanted in text.lower() for text in one[1])]
        if self.table != "logs" or number:
            found.sort(key=lambda one: _rank(one[0][number]), reverse=descends)
        return [texts for _, texts in found]

    def _headline(self, width: int) -> Text:
        status = self.facts.status
        if status is None:
            return Text("waits for the supervisor to publish the state of the run", "yellow")
        line = Text.assemble((f"{status.run} ", "bold"), (status.state, _STYLES.get(status.state, "")))
        line.append(f" {duration(status.elapsed_s)}")
        if status.step is not None:
            line.append(f"  step {status.step:,}" + (f" of {status.steps:,}" if status.steps else ""))
        if status.reward is not None:
            line.append(f"  reward {status.reward:.3f}")
        if status.mean_lag_versions is not None:
            line.append(f"  lag {status.mean_lag_versions:.2f}")
        if (rate := status.per_s.get("trained_tokens")) is not None:
            line.append(f"  {rate:,.0f} tokens/s")
        if troubles := len(status.stalls) + len(status.alerts):
            line.append(f"  ▲ {troubles}", "yellow")
        line.truncate(width, overflow="ellipsis")
        return line

    def _tabs(self) -> Text:
        line = Text(no_wrap=True)
        for number, name in enumerate(TABLES, 1):
            line.append(f"{number} ", "dim").append(name, "reverse" if name == self.table else "").append("  ")
        return line

    def _grid(self, rows: list[tuple[str, ...]], width: int) -> Table:
        columns, (number, descends) = COLUMNS[self.table], self._order[self.table]
        grid = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", width=width, pad_edge=False)
        for place, column in enumerate(columns):
            mark = (" ▼" if descends else " ▲") if place == number else ""
            grid.add_column(
                column.name + mark,
                justify="right" if column.form else "left",
                ratio=column.share or None,
                no_wrap=True,
                overflow="ellipsis",
                min_width=len(column.name + mark) if column.form else None,
            )
        for row in rows:
            texts = [Text(printable(text).replace("\n", " "), _STYLES.get(text, "")) for text in row]
            grid.add_row(*texts)
        for _ in range(self._page - len(rows)):
            grid.add_row()
        return grid

    def _keys(self, shown: int, count: int) -> Text:
        words = f"{shown} of {count:,}  q quit  tab table  s sort  r reverse  / filter"
        line = Text(words, "dim", no_wrap=True)
        if self.typing or self.filter:
            line.append(f": {printable(self.filter)}{'▏' if self.typing else ''}", "not dim bold")
        return line


def _rank(value: Cell) -> tuple[int, float, str]:
    """Order numbers by value, texts by letters and missing values first."""
    if value is None:
        return 0, 0.0, ""
    return (1, 0.0, value) if isinstance(value, str) else (1, value, "")
