// Trajectories: a list with a filter, and for each its conversation and its tokens.

import { h, longText, number } from "../dom.js";
import { Table } from "../table.js";
import { listOf } from "./actors.js";
import { TokenStrip, segmentsOf } from "./tokens.js";

const NEWEST = 5_000; // grades that are read at first
const BATCHES = 200;

export class Trajectories {
  constructor(store, source) {
    this.store = store;
    this.source = source; // reads tokens; null in a report
    this.filter = "";
    this.colouring = "version";
    this.details = h("aside", { class: "details wide" }, h("p", { class: "dim" }, "choose a trajectory to read it"));
    this.count = h("span", { class: "dim" });
    const search = h("input", {
      type: "search", placeholder: "p000042, rl, reward>0.5, truncated", "aria-label": "filter trajectories",
      input: (event) => { this.filter = event.target.value; this.#show(); },
    });
    const columns = [
      ["name", "trajectory", (row) => row.name, String],
      ["stage", "stage", (row) => row.stage ?? "–", String],
      ["reward", "reward", (row) => row.reward ?? NaN, number],
      ["tokens", "tokens", (row) => row.tokens ?? NaN, number],
      ["versions", "versions", (row) => spanOf(row.versions), String],
      ["step", "step", (row) => row.step ?? NaN, (value) => (Number.isNaN(value) ? "–" : number(value))],
      ["advantage", "advantage", (row) => row.advantage ?? NaN, (value) => (Number.isNaN(value) ? "–" : number(value))],
    ].map(([name, title, value, write]) => ({ name, title, value, text: (row) => write(value(row)), wide: name === "name" }));
    this.table = new Table(columns, { key: (row) => row.name, onPick: (row) => this.#open(row), sortBy: "", label: "trajectories" });
    this.element = h("section", { class: "view split" },
      h("div", { class: "main" }, h("div", { class: "bar" }, search, this.count), this.table.element), this.details);
  }

  topics() {
    return [["trajectory.graded", NEWEST], ["batch.packed", BATCHES]];
  }

  update(changed, force) {
    if (force) this.source?.pieces(); // a large vocabulary takes seconds
    if (force || changed.has("trajectories")) this.#show();
  }

  #show() {
    const matches = filterOf(this.filter);
    const rows = [...this.store.trajectories.values()].filter(matches).reverse();
    if (this.source === null) rows.sort((a, b) => (b.generated !== undefined) - (a.generated !== undefined));
    this.count.textContent = `${rows.length.toLocaleString("en")} of the newest ${this.store.trajectories.size.toLocaleString("en")}`;
    this.table.show(rows);
    const picked = this.store.trajectories.get(this.table.picked);
    if (picked !== undefined) this.facts?.replaceWith((this.facts = listOf(factsOf(picked))));
  }

  async #open(row) {
    this.facts = listOf(factsOf(row));
    const name = h("h2", {}, row.name);
    const show = (...rest) => this.table.picked === row.name && this.details.replaceChildren(name, this.facts, ...rest);
    if (row.generated === undefined && this.source === null) {
      show(h("p", { class: "dim" }, "the report has the tokens of the newest trajectories alone"));
      return;
    }
    show(h("p", { class: "dim" }, "reading its tokens"));
    try {
      const generated = row.generated ?? (await this.source.trajectory(row.sequence));
      if (generated === null) {
        show(h("p", { class: "missing" }, "its tokens were trimmed: no checkpoint needs them any more"));
        return;
      }
      const pieces = this.store.pieces ?? (await this.source?.pieces()) ?? null;
      show(...this.#parts(row, generated, pieces));
    } catch (error) {
      const refused = /permission|timeout/i.test(String(error));
      show(h("p", { class: "missing" }, refused ? "this login reads no texts: log in as monitor" : `it cannot be read: ${error.message}`));
    }
  }

  #parts(row, generated, pieces) {
    const prompt = (generated.rows ?? [])[Math.min(generated.member ?? 0, (generated.rows ?? []).length - 1)]?.prompt;
    const messages = Array.isArray(prompt) ? prompt : prompt === undefined ? [] : [{ role: "prompt", content: prompt }];
    const bubbles = messages.map((message) => bubble(message.role ?? "message", contentOf(message)));
    const segments = segmentsOf(generated);
    bubbles.push(...(pieces === null || segments.length === 0 ? [bubble("completion", generated.completion ?? "")] : turnsOf(segments, pieces)));
    const parts = [h("h3", {}, "Conversation"), h("div", { class: "conversation" }, bubbles)];
    if (generated.completion) parts.push(h("h3", {}, "Graded text"), longText(generated.completion));
    const strip = new TokenStrip(segments, { pieces, advantage: row.advantage, colouring: this.colouring });
    return [...parts, h("h3", {}, "Tokens"), strip.element];
  }
}

/** The texts of the segments after their prompts: sampled ones, and those that the policy observed. */
function turnsOf(segments, pieces) {
  const found = [];
  for (const { tokens, mask } of segments) {
    let first = mask.indexOf(1);
    while (first >= 0 && first < tokens.length) {
      let end = first;
      while (end < tokens.length && mask[end] === mask[first]) end += 1;
      const text = [...tokens.subarray(first, end)].map((token) => pieces[token] ?? `<${token}>`).join("");
      found.push(bubble(mask[first] ? "policy" : "observed", text));
      first = end;
    }
  }
  return found;
}

function contentOf(message) {
  const { content } = message;
  const rest = message.tool_calls ? `\n${JSON.stringify(message.tool_calls, null, 2)}` : "";
  return `${typeof content === "string" ? content : JSON.stringify(content, null, 2)}${rest}`;
}

function bubble(role, text) {
  return h("section", { class: "bubble", "data-role": role }, h("h4", {}, role), longText(text));
}

function spanOf(versions = []) {
  const known = versions.filter((version) => version >= 0);
  if (!known.length) return "–";
  const [low, high] = [Math.min(...known), Math.max(...known)];
  return low === high ? String(low) : `${low} to ${high}`;
}

function factsOf(row) {
  return [["reward", number(row.reward)], ["tokens", number(row.tokens)], ["versions", spanOf(row.versions)],
    ["batch", row.stage === "eval" ? "none: an evaluation" : row.step === undefined ? "not packed yet" : number(row.step)],
    ["advantage", row.advantage === undefined ? "–" : number(row.advantage)], ["truncated", row.truncated ? "yes" : "no"]];
}

/** Words of a filter: part of a name or stage, `truncated`, or a comparison such as `reward>0.5`. */
function filterOf(text) {
  const tests = text.trim().split(/\s+/).filter(Boolean).map((word) => {
    const parts = /^(reward|tokens|step|advantage|version)(<=|>=|<|>|=)(-?[\d.]+)$/.exec(word);
    if (parts === null) return (row) => row.name.includes(word) || row.stage === word || (word === "truncated" && row.truncated);
    const [, name, sign, value] = parts;
    const wanted = Number(value);
    const read = (row) => (name === "version" ? Math.max(...(row.versions ?? [])) : row[name] ?? NaN);
    const holds = { "<": (a) => a < wanted, ">": (a) => a > wanted, "=": (a) => a === wanted, "<=": (a) => a <= wanted, ">=": (a) => a >= wanted };
    return (row) => holds[sign](read(row));
  });
  return (row) => tests.every((test) => test(row));
}
