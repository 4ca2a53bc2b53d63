// The overview: figures of the newest state, findings with advice, and charts of any metric.

import { Chart } from "../charts.js";
import { choice, clock, h, number, percent, seconds, setText } from "../dom.js";

const FIRST = ["reward/mean", "lag/mean", "throughput/tokens_per_s", "response_length/mean"];
const KEPT = "asyncrl charts";
const EVENTS = 30;

/** Figures of the state: a name, and how it is read and shown. */
const FIGURES = [
  ["state", (status) => status.state, String],
  ["step", (status) => status.step, number],
  ["steps", (status) => status.steps, number],
  ["version", (status) => status.version, number],
  ["reward", (status) => status.reward, number],
  ["mean_lag_versions", (status) => status.mean_lag_versions, number],
  ["tokens/s", (status) => status.per_s?.trained_tokens, number],
  ["trajectories/s", (status) => status.per_s?.trajectories, number],
  ["learner_busy", (_status, store) => busyShare(store.steps), percent],
  ["checkpoint_step", (status) => status.checkpoint_step, number],
  ["trajectories_failed", (status) => status.trajectories_failed, number],
  ["elapsed_s", (status) => status.elapsed_s, seconds],
];
const TITLES = {
  mean_lag_versions: "mean lag",
  checkpoint_step: "checkpoint",
  trajectories_failed: "failed trajectories",
  elapsed_s: "elapsed",
  steps: "steps in all",
  learner_busy: "learner trains",
};
const RECENT = 20; // steps

export class Overview {
  constructor(store) {
    this.store = store;
    this.charts = new Map();
    this.figures = FIGURES.map(([name]) => {
      const value = h("b", { "data-name": name });
      return { value, box: h("div", { class: "figure" }, h("span", {}, TITLES[name] ?? name), value) };
    });
    this.findings = h("section", { class: "findings", "aria-label": "findings" });
    this.grid = h("div", { class: "charts" });
    this.picker = h("div", { class: "picker" });
    this.pools = h("tbody");
    this.streams = h("tbody");
    this.events = h("ol", { class: "events" });
    this.element = h("section", { class: "view overview" },
      h("div", { class: "figures" }, this.figures.map((one) => one.box)),
      this.findings, this.picker, this.grid,
      h("div", { class: "columns" },
        h("section", {}, h("h2", {}, "Processes"), tableOf(["pool", "live", "cores", "GPU", "cache", "waiting", "working"], this.pools)),
        h("section", {}, h("h2", {}, "Streams and evaluations"), tableOf(["name", "value"], this.streams)),
        h("section", {}, h("h2", {}, "Events"), this.events)));
    this.wanted = keptCharts();
  }

  topics() {
    return [];
  }

  update(changed, force) {
    if (force || changed.has("status")) this.#showStatus();
    if (force || changed.has("steps") || changed.has("moments")) this.#showCharts(force);
  }

  #showStatus() {
    const status = this.store.status;
    if (status === null) return;
    FIGURES.forEach(([, read, write], at) => {
      const value = read(status, this.store);
      const { value: element } = this.figures[at];
      setText(element, write(value ?? null));
      element.dataset.value = JSON.stringify(value ?? null);
    });
    this.#showFindings(status);
    this.pools.replaceChildren(...poolRows(status));
    this.streams.replaceChildren(...streamRows(status));
    const events = (status.events ?? []).slice(-EVENTS).reverse();
    this.events.replaceChildren(...events.map((event) =>
      h("li", { class: event.kind === "warning" ? "warning" : "" }, h("time", {}, clock(event.at_s * 1000)), ` ${event.text}`)));
  }

  #showFindings(status) {
    const stalls = (status.stalls ?? []).map((stall) => h("article", { class: "finding", "data-cause": stall.cause },
      h("h3", {}, `${stall.cause}: ${stall.object}`), h("p", {}, stall.evidence), h("p", { class: "advice" }, `To do: ${stall.advice}`)));
    const alerts = (status.alerts ?? []).map((alert) => h("article", { class: "finding", "data-alert": alert.alert },
      h("h3", {}, `alert ${alert.alert}: ${alert.when}`), h("p", {}, `raised in step ${alert.step} by the value ${number(alert.value)}`)));
    const failure = status.failure ? [h("article", { class: "finding failed" }, h("h3", {}, "the run failed"), h("pre", {}, status.failure))] : [];
    const found = [...failure, ...stalls, ...alerts];
    this.findings.replaceChildren(...found);
    this.findings.hidden = found.length === 0;
  }

  /** A metric is of steps, or of moments where more of them have it. */
  #sourceOf(name) {
    const { steps, moments } = this.store;
    const ofSteps = steps.counts.get(name) ?? 0;
    if (ofSteps > 0 && (ofSteps >= steps.counts.get("loss") / 2 || ofSteps >= (moments.counts.get(name) ?? 0))) {
      return { table: steps, x: "step", byTime: false };
    }
    return { table: moments, x: "at_s", byTime: true };
  }

  #showCharts(force) {
    const { steps, moments } = this.store;
    const names = [...new Set([...steps.names(), ...moments.names()])].filter((name) => !["step", "time", "at_s"].includes(name)).sort();
    const known = names.join("\n");
    if (known !== this.known) {
      this.known = known;
      const options = [["", "choose a metric"], ...names.map((name) => [name, name])];
      this.picker.replaceChildren(choice("Add a chart:", options, "", (name) => name && this.#add(name)));
    }
    for (const name of this.wanted) {
      const { table, x, byTime } = this.#sourceOf(name);
      let chart = this.charts.get(name);
      if (chart === undefined || chart.byTime !== byTime) {
        const next = new Chart(name, { onRemove: () => this.#remove(name), byTime });
        if (chart === undefined) this.grid.append(next.element);
        else chart.element.replaceWith(next.element);
        chart?.close();
        this.charts.set(name, (chart = next));
      }
      if (force) chart.restyle();
      const from = table.first(name);
      chart.show(table.values(x, from), [{ name, values: table.values(name, from), spanGaps: byTime }], table.newest(name));
    }
  }

  #add(name) {
    if (!this.wanted.includes(name)) this.wanted.push(name);
    keepCharts(this.wanted);
    this.#showCharts(false);
  }

  #remove(name) {
    this.wanted = this.wanted.filter((one) => one !== name);
    this.charts.get(name).close();
    this.charts.delete(name);
    keepCharts(this.wanted);
  }
}

/** The share of the newest steps that the learner trained; it waited for batches in the rest. */
function busyShare(steps) {
  let [train, wait] = [0, 0];
  for (let at = Math.max(0, steps.length - RECENT); at < steps.length; at += 1) {
    train += steps.get("train_s", at) || 0;
    wait += steps.get("wait_s", at) || 0;
  }
  return train + wait > 0 ? train / (train + wait) : null;
}

function keptCharts() {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) ?? [...FIRST];
  } catch {
    return [...FIRST]; // a page from a file may have no storage
  }
}

function keepCharts(names) {
  try {
    localStorage.setItem(KEPT, JSON.stringify(names));
  } catch {
    // the next visit begins with the first charts
  }
}

function tableOf(titles, body) {
  return h("table", {}, h("thead", {}, h("tr", {}, titles.map((title) => h("th", { scope: "col" }, title)))), body);
}

function poolRows(status) {
  const queues = status.queues ?? {};
  return Object.entries(status.pools ?? {}).map(([name, pool]) => {
    const queue = queues[name] ?? {};
    const cells = [name, `${pool.live} of ${status.wanted?.[name] ?? pool.live}`, number(pool.cores), percent(pool.gauges?.gpu_share),
      percent(pool.gauges?.cache_share), number(queue.waiting), number(queue.under_way)];
    return h("tr", { title: pool.last_error || undefined, "data-pool": name }, cells.map((cell) => h("td", {}, cell)));
  });
}

function streamRows(status) {
  const rows = Object.entries(status.streams ?? {}).map(([name, stream]) => [`stream ${name}`, `${percent(stream.share)} full`]);
  for (const scored of status.evals ?? []) rows.push([`accuracy of version ${scored.version}`, number(scored.accuracy)]);
  for (const [reason, count] of Object.entries(status.groups_dropped ?? {})) rows.push([`groups dropped for ${reason}`, number(count)]);
  for (const [lag, count] of Object.entries(status.recent_tokens_by_lag ?? {})) rows.push([`recent tokens with lag ${lag}`, number(count)]);
  for (const profile of status.profiles ?? []) rows.push([`profile of ${profile.actor_id}, ${profile.kind}`, fileOfRun(profile.path)]);
  return rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell))));
}

/** A link to a file below the run's directory, where the page itself is a file of it, and its path elsewhere. */
function fileOfRun(path) {
  const inside = path.startsWith("profiles/") && !path.split("/").includes("..");
  return location.protocol === "file:" && inside ? h("a", { href: encodeURI(path) }, path) : path;
}
