// The timeline: phases of the learner, updates of engines, lives of actors, one lane each.

import { choice, clock, h, seconds, visible } from "../dom.js";

const LANE_PX = 20;
const LABEL_PX = 130;
const TOP_PX = 24;
const MOST_LANES = 96;
const COLOURS = { train: "--line-1", wait: "--wait", update: "--line-2", life: "--life", version: "--line-2", checkpoint: "--line-3", evaluation: "--line-4" };
const LEGEND = { train: "training", wait: "waiting for a batch", update: "update of weights", life: "process lives" };
const RANGES = [["60", "last minute"], ["600", "last 10 minutes"], ["3600", "last hour"], ["all", "whole run"]];

export class Timeline {
  constructor(store) {
    this.store = store;
    this.range = "600";
    this.window = null; // chosen by wheel and keys: { from, to } in ms
    this.boxes = []; // of what is drawn, for the pointer
    this.canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": "timeline of the run", keydown: (event) => this.#onKey(event) });
    this.tip = h("div", { class: "tip", hidden: true });
    this.note = h("span", { class: "dim" });
    const legend = Object.entries(LEGEND).map(([kind, text]) => h("span", { class: `key ${kind}` }, text));
    this.element = h("section", { class: "view timeline" },
      h("div", { class: "bar" }, choice("Range", RANGES, this.range, (value) => { this.range = value; this.window = null; this.#draw(); }), legend, this.note),
      h("div", { class: "lanes" }, this.canvas, this.tip));
    this.canvas.addEventListener("mousemove", (event) => this.#point(event));
    this.canvas.addEventListener("mouseleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("wheel", (event) => this.#zoom(event), { passive: false });
    new ResizeObserver(() => this.#draw()).observe(this.element);
  }

  topics() {
    return ["weights.published", "checkpoint.saved", "eval.scored"].map((name) => [name, 2000])
      .concat(["engine.updating", "engine.ready", "actor.started", "actor.stopped"].map((name) => [name, 4000]));
  }

  update(changed, force) {
    if (force || changed.has("timeline") || changed.has("steps") || (changed.has("status") && this.window === null)) this.#draw();
  }

  #bounds() {
    if (this.window !== null) return this.window;
    const { steps, status, spans } = this.store;
    const times = [status === null ? NaN : status.at_s * 1000, steps.last("time")].filter(Number.isFinite);
    const to = times.length ? Math.max(...times) : Date.now();
    const trained = steps.get("time", 0) - 1000 * (steps.get("train_s", 0) || 0);
    const began = [trained, spans[0]?.from, ...[...this.store.open.values()].map((one) => one.at)].filter(Number.isFinite);
    const first = began.length ? Math.min(...began) : to - 600_000;
    return { from: this.range === "all" ? first : Math.max(first, to - Number(this.range) * 1000), to };
  }

  /** The lanes with the spans that are in a range. */
  #lanes({ from, to }) {
    const lanes = new Map([["learner", []]]);
    const learner = lanes.get("learner");
    const { steps } = this.store;
    for (let at = steps.length ? steps.find("time", from) : 0; at < steps.length; at += 1) {
      const end = steps.get("time", at);
      const train = 1000 * (steps.get("train_s", at) || 0);
      const wait = 1000 * (steps.get("wait_s", at) || 0);
      const step = steps.get("step", at);
      if (end - train - wait > to) break;
      learner.push({ kind: "wait", from: end - train - wait, to: end - train, text: `waiting for batch ${step}` });
      learner.push({ kind: "train", from: end - train, to: end, text: `training batch ${step}` });
    }
    const add = (span) => {
      if (span.to < from || span.from > to) return;
      if (!lanes.has(span.name)) lanes.set(span.name, []);
      lanes.get(span.name).push(span);
    };
    const now = Math.max(to, this.store.status === null ? 0 : this.store.status.at_s * 1000);
    for (const one of this.store.open.values()) add({ kind: one.kind, name: one.name, from: one.at, to: now, text: `${one.name}: ${one.kind}` });
    for (const span of this.store.spans) add({ ...span, text: `${span.name}: ${span.kind === "life" ? "process lives" : "update of weights"}, ${span.about}` });
    return [...lanes].sort(([a], [b]) => (a === "learner" ? -1 : b === "learner" ? 1 : a.localeCompare(b, "en", { numeric: true })));
  }

  #draw() {
    const width = this.element.clientWidth - 2;
    if (width <= LABEL_PX) return;
    const bounds = this.#bounds();
    const all = this.#lanes(bounds);
    const lanes = all.slice(0, MOST_LANES);
    this.note.textContent = all.length > lanes.length ? `${lanes.length} of ${all.length} lanes` : "";
    const height = TOP_PX + (lanes.length + 1) * LANE_PX;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    const scale = (width - LABEL_PX) / (bounds.to - bounds.from || 1);
    const place = (time) => LABEL_PX + Math.min(width, Math.max(0, (time - bounds.from) * scale));
    this.boxes = [];
    this.#drawAxis(pen, bounds, { width, height, place, colour });
    lanes.forEach(([name, spans], lane) => {
      const top = TOP_PX + lane * LANE_PX;
      pen.fillStyle = colour("--ink");
      pen.fillText(visible(name).slice(0, 20), 2, top + 14);
      spans.sort((a, b) => (a.kind === "life" ? -1 : 1) - (b.kind === "life" ? -1 : 1));
      for (const span of spans) {
        const left = place(span.from);
        const wide = Math.max(1, place(span.to) - left);
        const thin = span.kind === "life" ? 7 : 3;
        pen.fillStyle = colour(COLOURS[span.kind] ?? "--line-5");
        pen.fillRect(left, top + thin, wide, LANE_PX - 2 * thin);
        this.boxes.push({ left, right: left + Math.max(3, wide), top, bottom: top + LANE_PX, span });
      }
    });
    this.#drawMarks(pen, bounds, { top: TOP_PX + lanes.length * LANE_PX, place, colour });
  }

  #drawAxis(pen, bounds, { width, height, place, colour }) {
    pen.fillStyle = colour("--dim");
    pen.strokeStyle = colour("--grid");
    const count = Math.max(2, Math.floor((width - LABEL_PX) / 110));
    for (let tick = 0; tick <= count; tick += 1) {
      const time = bounds.from + ((bounds.to - bounds.from) * tick) / count;
      const left = Math.round(place(time)) + 0.5;
      pen.beginPath();
      pen.moveTo(left, TOP_PX - 6);
      pen.lineTo(left, height);
      pen.stroke();
      if (tick < count) pen.fillText(clock(time), left + 2, 12);
    }
  }

  #drawMarks(pen, bounds, { top, place, colour }) {
    pen.fillStyle = colour("--ink");
    pen.fillText("versions", 2, top + 14);
    for (const mark of this.store.marks) {
      if (mark.at < bounds.from || mark.at > bounds.to) continue;
      const left = place(mark.at);
      pen.fillStyle = colour(COLOURS[mark.kind]);
      pen.beginPath();
      pen.arc(left, top + 10, mark.kind === "version" ? 2.5 : 4, 0, 7);
      pen.fill();
      this.boxes.push({ left: left - 4, right: left + 4, top, bottom: top + LANE_PX, span: { from: mark.at, to: mark.at, text: mark.text } });
    }
  }

  #point(event) {
    const { offsetX: x, offsetY: y } = event;
    const box = this.boxes.findLast((one) => x >= one.left && x <= one.right && y >= one.top && y < one.bottom);
    this.tip.hidden = box === undefined;
    if (box === undefined) return;
    const { span } = box;
    this.tip.textContent = visible(`${span.text}, ${clock(span.from)}${span.to > span.from ? `, ${seconds((span.to - span.from) / 1000)}` : ""}`);
    this.tip.style.left = `${Math.min(x, this.element.clientWidth - 260)}px`;
    this.tip.style.top = `${y + 16}px`;
  }

  #zoom(event) {
    if (!event.ctrlKey && !event.shiftKey) return; // the wheel alone scrolls the page
    event.preventDefault();
    const share = (event.offsetX - LABEL_PX) / (this.element.clientWidth - LABEL_PX);
    this.#scaleBy(event.deltaY > 0 ? 1.3 : 1 / 1.3, Math.min(1, Math.max(0, share)));
  }

  #scaleBy(factor, share) {
    const { from, to } = this.#bounds();
    const middle = from + (to - from) * share;
    this.window = { from: middle - (middle - from) * factor, to: middle + (to - middle) * factor };
    this.#draw();
  }

  #onKey(event) {
    const { from, to } = this.#bounds();
    const move = { ArrowLeft: -0.2, ArrowRight: 0.2 }[event.key];
    if (event.key === "+" || event.key === "-") this.#scaleBy(event.key === "+" ? 1 / 1.3 : 1.3, 0.5);
    else if (event.key === "Escape") this.window = null;
    else if (move !== undefined) this.window = { from: from + (to - from) * move, to: to + (to - from) * move };
    else return;
    event.preventDefault();
    this.#draw();
  }
}
