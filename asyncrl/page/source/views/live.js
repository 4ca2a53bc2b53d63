// Live traffic: the newest turns, without their texts, which are encrypted.

import { clock, h, number } from "../dom.js";
import { Table } from "../table.js";

const NEWEST = 4_000; // messages of the log that are read at first

export class Live {
  constructor(store) {
    this.store = store;
    this.note = h("p", { class: "dim" });
    const number_ = (value) => (value === null || value === undefined || Number.isNaN(value) ? "–" : number(value));
    const columns = [
      ["time", "time", (row) => row.time ?? 0, clock],
      ["name", "turn", (row) => row.name, String],
      ["session", "session", (row) => row.session ?? "–", String],
      ["tenant", "tenant", (row) => row.tenant ?? "–", String],
      ["prompt", "prompt tokens", (row) => row.promptTokens ?? NaN, number_],
      ["tokens", "reply tokens", (row) => row.tokens ?? NaN, number_],
      ["version", "version", (row) => row.version ?? NaN, number_],
      ["took", "seconds", (row) => (row.ended - row.time) / 1000, number_],
      ["finish", "end", (row) => row.finish ?? "open", String],
      ["reward", "judge", (row) => row.reward ?? NaN, number_],
      ["feedback", "user", (row) => row.feedback ?? NaN, number_],
      ["skip", "not trained", (row) => row.skip || row.marks || "", String],
    ].map(([name, title, value, write]) => ({ name, title, value, text: (row) => write(value(row)) }));
    this.table = new Table(columns, { key: (row) => row.name, sortBy: "time", descending: true, label: "turns of live traffic" });
    this.element = h("section", { class: "view" }, this.note, this.table.element);
  }

  topics() {
    return ["turn.started", "turn.finished", "turn.judged", "feedback.given"].map((name) => [name, NEWEST]);
  }

  update(changed, force) {
    if (!force && !changed.has("live")) return;
    const count = this.store.turns.size;
    this.note.textContent = count
      ? `the newest ${count.toLocaleString("en")} turns; their texts are encrypted, and read with asyncrl tap where the data keys are`
      : "no live traffic that this login may read";
    this.table.show([...this.store.turns.values()]);
  }
}
