// Compare: the metrics of this run next to those of others, from their reports or their metrics.jsonl.

import { Chart } from "../charts.js";
import { Columns } from "../columns.js";
import { choice, h, number } from "../dom.js";
import { recordsIn } from "../report.js";
import { Store } from "../store.js";
import { named } from "../topics.js";

const TITLES = ["run", "steps", "newest", "largest", "mean of the last 10"];

export class Compare {
  constructor(store) {
    this.store = store;
    this.others = []; // { name, steps }
    this.metric = "reward/mean";
    this.picker = h("span", {});
    this.note = h("p", { class: "dim", role: "status" });
    const files = h("input", {
      type: "file", multiple: true, accept: ".html,.jsonl", "aria-label": "files of other runs",
      change: () => this.#load([...files.files]),
    });
    this.box = h("div", {});
    this.body = h("tbody");
    this.element = h("section", { class: "view compare" },
      h("p", {}, "Choose report.html or metrics.jsonl of other runs. The files stay in this browser."),
      h("div", { class: "bar" }, files, this.picker), this.note, this.box,
      h("div", { class: "numbers" }, h("table", {}, h("thead", {}, h("tr", {}, TITLES.map((title) => h("th", { scope: "col" }, title)))), this.body)));
  }

  topics() {
    return [];
  }

  update(changed, force) {
    if (force || changed.has("steps")) this.#show(force);
  }

  async #load(files) {
    for (const file of files) {
      try {
        this.others.push(await runIn(file));
        this.note.textContent = "";
      } catch (error) {
        this.note.textContent = `${file.name} cannot be read: ${error.message}`;
      }
    }
    this.#show(false);
  }

  #show(force) {
    const runs = [{ name: this.store.run || "this run", steps: this.store.steps }, ...this.others];
    const names = [...new Set(runs.flatMap((run) => run.steps.names()))].filter((name) => name !== "step" && name !== "time").sort();
    if (names.join("\n") !== this.known) {
      this.known = names.join("\n");
      this.picker.replaceChildren(choice("Metric", names.map((name) => [name, name]), this.metric, (name) => { this.metric = name; this.#show(true); }));
    }
    if (force || this.chart === undefined) {
      this.chart?.close();
      this.chart = new Chart(this.metric);
      this.box.replaceChildren(this.chart.element);
    }
    const steps = [...new Set(runs.flatMap((run) => run.steps.values("step")))].filter((step) => step !== null).sort((a, b) => a - b);
    const series = runs.map((run) => ({ name: run.name, values: aligned(run.steps, steps, this.metric), spanGaps: true }));
    this.chart.show(steps, series, runs[0].steps.newest(this.metric));
    this.body.replaceChildren(...runs.map((run) => rowOf(run, this.metric)));
  }
}

function aligned(table, steps, metric) {
  const own = new Map(table.values("step").map((step, at) => [step, table.get(metric, at)]));
  return steps.map((step) => (Number.isFinite(own.get(step)) ? own.get(step) : null));
}

function rowOf(run, metric) {
  const values = run.steps.values(metric).filter((value) => value !== null);
  const recent = values.slice(-10);
  const mean = recent.reduce((sum, value) => sum + value, 0) / recent.length;
  const largest = values.reduce((most, value) => Math.max(most, value), -Infinity);
  const cells = [run.name, ...[run.steps.length, values.at(-1), largest, mean].map(number)];
  return h("tr", {}, cells.map((cell) => h("td", {}, cell)));
}

async function runIn(file) {
  const text = await file.text();
  const name = file.name.replace(/\.(html|jsonl)$/, "");
  if (!file.name.endsWith(".jsonl")) {
    const store = new Store();
    const { run, records } = await recordsIn(text);
    for (const [topic, message, meta] of records) store.take(topic, message, meta);
    return { name: run, steps: store.steps };
  }
  const steps = new Columns(100_000);
  for (const line of text.split("\n")) {
    if (!line.trim()) continue;
    const row = named(JSON.parse(line.replace(/:\s*-?(NaN|Infinity)/g, ":null")));
    if (row.event === "step" && row.stage === "rl") steps.push(row);
  }
  if (steps.length === 0) throw new Error("it has no steps");
  return { name, steps };
}
