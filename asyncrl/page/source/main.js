// The page: its views, its theme, its keys, and where its data comes from.

import { Connection } from "./connection.js";
import { h, setText } from "./dom.js";
import { recordsOf } from "./report.js";
import { Store } from "./store.js";
import { Actors } from "./views/actors.js";
import { Compare } from "./views/compare.js";
import { Live } from "./views/live.js";
import { Overview } from "./views/overview.js";
import { Timeline } from "./views/timeline.js";
import { Trajectories } from "./views/trajectories.js";

const TICK_MS = 250;
const THEME = "asyncrl theme";

class Page {
  constructor() {
    this.store = new Store();
    this.fragment = new URLSearchParams(location.hash.slice(1));
    this.connection = null;
    this.state = h("span", { class: "state", role: "status" });
    this.title = h("h1", {});
    this.place = h("main", {});
  }

  async start() {
    const data = document.getElementById("data").textContent.trim();
    const isReport = data !== "";
    const login = isReport ? null : loginOf(this.fragment);
    this.store.run = login?.run ?? "";
    if (login !== null) this.connection = new Connection(login, this.store, (text, live) => this.#onState(text, live));
    this.#build(isReport);
    if (isReport) await this.#loadReport(data);
    else if (login === null) this.#onState("the address names no run; `asyncrl web` prints a whole one", false);
    else this.#connect();
    this.#tick();
  }

  #build(isReport) {
    const source = isReport ? null : { trajectory: (sequence) => this.connection.trajectory(sequence), pieces: () => this.#pieces() };
    this.views = [
      ["overview", new Overview(this.store)],
      ["timeline", new Timeline(this.store)],
      ["actors", new Actors(this.store)],
      ["trajectories", new Trajectories(this.store, source)],
      ["live", new Live(this.store)],
      ["compare", new Compare(this.store)],
    ];
    this.tabs = this.views.map(([name], at) => h("button", {
      type: "button", role: "tab", title: `key ${at + 1}`, "data-view": name, click: () => this.show(name),
    }, name === "live" ? "live traffic" : name));
    const theme = h("button", { type: "button", class: "quiet", title: "light or dark (key t)", click: () => this.#toggleTheme() }, "◐");
    const licences = h("dialog", {}, h("pre", {}, document.getElementById("licences").textContent),
      h("button", { type: "button", click: () => licences.close() }, "close"));
    document.body.append(
      h("header", {}, this.title, this.state, h("nav", { role: "tablist" }, this.tabs), theme),
      this.place, licences,
      h("footer", { class: "dim" }, h("button", { type: "button", class: "quiet", click: () => licences.showModal() }, "licences")),
    );
    this.#useTheme(keptTheme());
    addEventListener("keydown", (event) => this.#onKey(event));
    this.show(this.views.some(([name]) => name === this.fragment.get("view")) ? this.fragment.get("view") : "overview");
  }

  async #loadReport(data) {
    const report = await recordsOf(data);
    this.store.run = report.run;
    this.store.pieces = report.pieces ?? null;
    for (const [topic, message, meta] of report.records) this.store.take(topic, message, meta);
    this.#onState(`report, ${new Date(report.at_s * 1000).toLocaleString("en-GB")}`, true);
  }

  async #connect() {
    if (!(await this.connection.open())) return;
    this.connection.follow("run.state", "newest");
    this.connection.follow("run.history");
    this.connection.follow("batch.trained");
    this.#follow();
  }

  /** The texts of tokens, which `asyncrl web` serves next to the page. */
  #pieces() {
    this.pieces ??= location.protocol.startsWith("http")
      ? fetch("pieces.json").then((answer) => answer.json()).catch(() => null) // then ids are shown
      : Promise.resolve(null);
    return this.pieces;
  }

  show(name) {
    this.view?.topics().forEach(([topic]) => this.connection?.leave(topic));
    this.name = name;
    this.view = this.views.find(([one]) => one === name)[1];
    for (const tab of this.tabs) tab.setAttribute("aria-selected", String(tab.dataset.view === name));
    this.place.replaceChildren(this.view.element);
    this.fragment.set("view", name);
    history.replaceState(null, "", `#${this.fragment}`);
    this.#follow();
    this.view.update(new Set(), true);
  }

  #follow() {
    if (this.connection?.js === undefined) return;
    for (const [topic, start] of this.view.topics()) this.connection.follow(topic, start);
  }

  #tick() {
    const { changed } = this.store;
    if (changed.size) {
      this.store.changed = new Set();
      if (changed.has("status")) setText(this.title, `run ${this.store.status.run}`);
      const later = this.view.update(changed, false);
      if (later) changed.forEach((kind) => this.store.changed.add(kind));
      document.body.dataset.messages = this.store.messages;
    }
    setTimeout(() => this.#tick(), TICK_MS);
  }

  #onState(text, live) {
    setText(this.state, text);
    this.state.classList.toggle("good", live);
    if (!this.title.textContent && this.store.run) setText(this.title, `run ${this.store.run}`);
    if (this.store.run) document.title = `${this.store.run} · asyncrl`;
  }

  #toggleTheme() {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
    this.#useTheme(dark ? "light" : "dark");
    try {
      localStorage.setItem(THEME, dark ? "light" : "dark");
    } catch {
      // the next visit begins with the theme of the system
    }
    this.view.update(new Set(), true);
  }

  #useTheme(theme) {
    if (theme) document.documentElement.dataset.theme = theme;
  }

  #onKey(event) {
    if (event.target.matches?.("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = Number(event.key) - 1;
    if (this.views[at] !== undefined) this.show(this.views[at][0]);
    else if (event.key === "t") this.#toggleTheme();
    else if (event.key === "/") {
      event.preventDefault();
      this.view.element.querySelector("input[type=search]")?.focus();
    }
  }
}

function keptTheme() {
  try {
    return localStorage.getItem(THEME);
  } catch {
    return null;
  }
}

/** The login in the fragment of the address, which no browser sends to a server. */
function loginOf(fragment) {
  const [run, servers] = [fragment.get("run"), fragment.get("ws")];
  if (!run || !servers) return null;
  const [user, password] = [fragment.get("user") ?? "", fragment.get("password") ?? ""];
  return { run, servers: servers.split(","), user, password, role: fragment.get("role") ?? "", domain: fragment.get("domain") ?? "" };
}

new Page().start();
