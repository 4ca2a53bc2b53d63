// A table of any number of rows: only those that are seen are in the page.

import { h, setText } from "./dom.js";

const ROW_PX = 26;
const SPARE = 8; // rows above and below those that are seen

export class Table {
  /** `columns`: `{ name, title, value(row), text(row), wide }` each; `onPick` gets the row that a user chooses. */
  constructor(columns, { key, onPick, sortBy, descending = false, label }) {
    this.columns = columns;
    this.key = key;
    this.onPick = onPick;
    this.sort = { name: sortBy, descending };
    this.rows = [];
    this.picked = undefined;
    this.lines = new Map(); // elements of rows by their place
    this.head = h("div", { class: "row head", role: "row" }, columns.map((column) => h(
      "button",
      { type: "button", role: "columnheader", class: column.wide ? "wide" : "", click: () => this.#sortBy(column.name) },
      column.title,
    )));
    this.body = h("div", { class: "rows", role: "rowgroup" });
    this.box = h("div", { class: "scroll", tabindex: 0, role: "table", "aria-label": label, keydown: (event) => this.#onKey(event) }, this.body);
    this.element = h("div", { class: "table" }, this.head, this.box);
    this.box.addEventListener("scroll", () => this.#draw(), { passive: true });
    new ResizeObserver(() => this.#draw()).observe(this.box);
  }

  show(rows) {
    this.rows = rows;
    this.#order();
    this.#draw();
  }

  #order() {
    const column = this.columns.find((one) => one.name === this.sort.name);
    if (column === undefined) return;
    const sign = this.sort.descending ? -1 : 1;
    const keys = new Map(this.rows.map((row) => [row, column.value(row)]));
    this.rows.sort((a, b) => sign * compare(keys.get(a), keys.get(b)));
    for (const [at, cell] of [...this.head.children].entries()) {
      const own = this.columns[at].name === this.sort.name;
      cell.setAttribute("aria-sort", own ? (this.sort.descending ? "descending" : "ascending") : "none");
    }
  }

  #sortBy(name) {
    this.sort = { name, descending: this.sort.name === name ? !this.sort.descending : true };
    this.#order();
    this.#draw();
  }

  #draw() {
    const height = `${this.rows.length * ROW_PX}px`;
    if (this.body.style.height !== height) this.body.style.height = height;
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW_PX) - SPARE);
    const last = Math.min(this.rows.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / ROW_PX) + SPARE);
    for (const [at, line] of this.lines) {
      if (at < first || at >= last) {
        line.element.remove();
        this.lines.delete(at);
      }
    }
    for (let at = first; at < last; at += 1) this.#fill(this.#line(at), this.rows[at]);
  }

  #line(at) {
    let line = this.lines.get(at);
    if (line === undefined) {
      const cells = this.columns.map((column) => h("span", { role: "cell", class: column.wide ? "wide" : "" }));
      const element = h("div", { class: "row", role: "row", click: () => this.pick(this.rows[at]) }, cells);
      element.style.transform = `translateY(${at * ROW_PX}px)`;
      line = { element, cells };
      this.lines.set(at, line);
      this.body.append(element);
    }
    return line;
  }

  #fill({ element, cells }, row) {
    const key = this.key(row);
    if (element.dataset.key !== key) element.dataset.key = key;
    element.classList.toggle("picked", key === this.picked);
    this.columns.forEach((column, at) => setText(cells[at], column.text(row)));
  }

  pick(row) {
    if (row === undefined || this.onPick === undefined) return;
    this.picked = this.key(row);
    this.#draw();
    this.onPick(row);
  }

  #onKey(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15 }[event.key];
    if (step === undefined || this.onPick === undefined) return;
    event.preventDefault();
    const at = this.rows.findIndex((row) => this.key(row) === this.picked);
    const next = Math.min(this.rows.length - 1, Math.max(0, at + step));
    const top = next * ROW_PX;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    if (top + ROW_PX > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = top + ROW_PX - this.box.clientHeight;
    this.pick(this.rows[next]);
  }
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") {
    if (Number.isNaN(a)) return Number.isNaN(b) ? 0 : -1;
    return Number.isNaN(b) ? 1 : a - b;
  }
  return String(a).localeCompare(String(b), "en", { numeric: true });
}
