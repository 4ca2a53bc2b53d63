// All actors with their vital signs, sorted and filtered.

import { h, number, percent, seconds } from "../dom.js";
import { Table } from "../table.js";

const EVERY_MS = 1000; // a large fleet sends hundreds of messages a second

export class Actors {
  constructor(store) {
    this.store = store;
    this.filter = "";
    this.due = 0;
    this.details = h("aside", { class: "details" });
    this.count = h("span", { class: "dim" });
    const search = h("input", {
      type: "search", placeholder: "filter actors", "aria-label": "filter actors",
      input: (event) => { this.filter = event.target.value.toLowerCase(); this.#show(); },
    });
    const columns = [
      column("actor_id", "actor", (row) => row.actor_id, { wide: true }),
      column("role", "role", (row) => row.role),
      column("doing", "activity", doing, { wide: true }),
      column("cpu_share", "cores", (row) => row.values?.cpu_share ?? NaN, { write: number }),
      column("gpu", "GPU", (row) => row.values?.gpu_share ?? NaN, { write: percent }),
      column("held", "work held", (row) => row.held?.length ?? 0, { write: number }),
      column("silent", "silent", (row) => this.#silent(row), { write: seconds }),
    ];
    this.table = new Table(columns, { key: (row) => row.actor_id, onPick: (row) => this.#detail(row), sortBy: "actor_id", label: "actors" });
    const list = h("div", { class: "main" }, h("div", { class: "bar" }, search, this.count), this.table.element);
    this.element = h("section", { class: "view split" }, list, this.details);
  }

  topics() {
    return [["vitals.taken", "newest"]];
  }

  update(changed, force) {
    const now = performance.now();
    if (!force && (!changed.has("actors") || now < this.due)) return changed.has("actors");
    this.due = now + EVERY_MS - 50;
    this.#show();
    return false;
  }

  #silent(row) {
    const now = this.store.status?.at_s;
    return now === undefined ? NaN : Math.max(0, now - row.at_s);
  }

  #show() {
    const rows = [...this.store.actors.values()].filter((row) => !this.filter || `${row.actor_id} ${doing(row)}`.toLowerCase().includes(this.filter));
    this.count.textContent = `${rows.length} of ${this.store.actors.size} actors`;
    this.table.show(rows);
    const picked = this.store.actors.get(this.table.picked);
    if (picked !== undefined) this.#detail(picked);
  }

  #detail(row) {
    const status = (this.store.status?.actors ?? []).find((one) => one.actor_id === row.actor_id);
    const facts = [["process", row.pid], ["host", status?.host ?? "–"], ["restarts", status?.restarts ?? "–"], ["activity", doing(row) || "–"]];
    if (status?.last_error) facts.push(["last error", status.last_error]);
    if (row.denied) facts.push(["refused by the server", row.denied]);
    const held = (row.held ?? []).map((work) => [work.id, heldText(work)]);
    const values = Object.entries(row.values ?? {}).sort(([a], [b]) => a.localeCompare(b)).map(([name, value]) => [name, number(value)]);
    const work = held.length ? [h("h3", {}, "Work"), listOf(held)] : [];
    const signs = values.length ? [h("h3", {}, "Vital signs"), listOf(values)] : [];
    this.details.replaceChildren(h("h2", {}, row.actor_id), listOf(facts), ...work, ...signs);
  }
}

function heldText(work) {
  const cause = `${work.waiting?.on ?? "its function"} ${work.waiting?.name ?? ""}`.trim();
  return `${seconds(work.held_s)}, ${work.tokens ?? 0} tokens, waits for ${cause}`;
}

function doing(row) {
  const activity = row.doing?.kind ?? "";
  return activity && row.doing.number ? `${activity} ${row.doing.number}` : activity;
}

function column(name, title, value, { write = String, wide = false } = {}) {
  return { name, title, value, text: (row) => write(value(row)), wide };
}

export function listOf(pairs) {
  return h("dl", {}, pairs.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}
