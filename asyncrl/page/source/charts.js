// Line charts on uPlot, in the colours of the page.

import uPlot from "uplot";
import { h, number, setText, visible } from "./dom.js";

const HEIGHT = 190;
const LINES = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"];

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** The name of the CSS variable with the colour of a line. */
export function lineColour(at) {
  return LINES[at % LINES.length];
}

export class Chart {
  /** `onRemove` adds a button that takes the chart away. */
  constructor(title, { onRemove, byTime = false } = {}) {
    this.byTime = byTime;
    this.value = h("b", { class: "value" });
    this.plotBox = h("div", { class: "plot" });
    const remove = onRemove === undefined ? null
      : h("button", { type: "button", class: "quiet", title: `remove the chart of ${visible(title)}`, click: onRemove }, "×");
    const head = h("figcaption", {}, h("span", { class: "name" }, title), this.value, remove);
    this.element = h("figure", { class: "chart", "data-chart": title }, head, this.plotBox);
    this.observer = new ResizeObserver(() => this.#resize());
    this.observer.observe(this.plotBox);
    this.shape = "";
  }

  /** Show series over a common axis: `{ name, values }` each, null for what is missing. */
  show(xs, series, newest) {
    setText(this.value, number(newest));
    this.value.dataset.value = String(newest);
    const width = this.plotBox.clientWidth;
    if (width === 0) return;
    const data = [xs, ...series.map((one) => one.values)];
    const shape = `${colour("--ink")} ${series.map((one) => one.name).join("\n")}`;
    if (this.plot === undefined || this.shape !== shape) {
      this.plot?.destroy();
      this.shape = shape;
      this.plot = new uPlot(this.#options(series, width), data, this.plotBox);
    } else {
      this.plot.setData(data);
    }
  }

  #options(series, width) {
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, size: 34 };
    return {
      width,
      height: HEIGHT,
      scales: { x: { time: this.byTime } },
      cursor: { points: { size: 6 }, drag: { x: true, y: false } },
      legend: { show: series.length > 1 },
      axes: [axis, { ...axis, size: 52, values: (_plot, values) => values.map(number) }],
      series: [{ label: this.byTime ? "time" : "step" }, ...series.map((one, at) => ({
        label: visible(one.name),
        stroke: colour(one.colour ?? lineColour(at)),
        width: 1.5,
        points: { show: false },
        spanGaps: one.spanGaps ?? false,
        value: (_plot, value) => number(value),
      }))],
    };
  }

  #resize() {
    const width = this.plotBox.clientWidth;
    if (this.plot !== undefined && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  /** Draw again in other colours. */
  restyle() {
    this.shape = "";
  }

  close() {
    this.observer.disconnect();
    this.plot?.destroy();
    this.element.remove();
  }
}
