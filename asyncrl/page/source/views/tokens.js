// The tokens of a trajectory, coloured by a property of each.

import { choice, h, number, visible } from "../dom.js";
import { arrayOf } from "../topics.js";

const LEVELS = 8; // classes c0 to c7, from low to high
const MOST = 200_000; // tokens that are shown
export const COLOURINGS = [
  ["version", "version"],
  ["logprob", "log-prob"],
  ["advantage", "advantage"],
  ["mask", "mask"],
];

/** The arrays of the segments of a trajectory. */
export function segmentsOf(generated) {
  return (generated.segments ?? []).map((segment) => ({
    tokens: arrayOf(Int32Array, segment.tokens),
    mask: arrayOf(Uint8Array, segment.mask),
    logprobs: arrayOf(Float32Array, segment.logprobs),
    versions: arrayOf(Int32Array, segment.versions),
  }));
}

export class TokenStrip {
  /** `pieces`: text of each token by its id, or null where the page has no tokenizer. */
  constructor(segments, { pieces, advantage, colouring }) {
    this.segments = segments;
    this.pieces = pieces;
    this.texts = new Map(); // shown text of each token
    this.advantage = advantage;
    this.spans = [];
    this.legend = h("p", { class: "legend dim" });
    this.strip = h("div", { class: "tokens", mouseover: (event) => this.#point(event) });
    this.about = h("p", { class: "about dim" }, "point at a token to see its figures");
    this.element = h("div", {}, choice("Colour by", COLOURINGS, colouring, (value) => this.colour(value)), this.legend, this.strip, this.about);
    this.#fill();
    this.colour(colouring);
  }

  #fill() {
    const parts = document.createDocumentFragment();
    for (const [number_, segment] of this.segments.entries()) {
      if (this.segments.length > 1) parts.append(h("h4", {}, `segment ${number_ + 1}`));
      const row = document.createElement("div");
      for (let at = 0; at < segment.tokens.length && this.spans.length < MOST; at += 1) {
        const span = document.createElement("span");
        span.textContent = this.#text(segment.tokens[at]);
        span.at = [segment, at];
        this.spans.push(span);
        row.append(span);
      }
      parts.append(row);
    }
    const count = this.segments.reduce((sum, segment) => sum + segment.tokens.length, 0);
    if (count > MOST) parts.append(h("p", { class: "dim" }, `the first ${number(MOST)} of ${number(count)} tokens`));
    this.strip.append(parts);
  }

  #text(token) {
    let text = this.texts.get(token);
    if (text === undefined) {
      const piece = this.pieces?.[token];
      text = piece === undefined ? `${token} ` : visible(piece);
      this.texts.set(token, text);
    }
    return text;
  }

  #value(segment, at, kind) {
    if (kind === "mask") return segment.mask[at];
    if (segment.mask[at] === 0) return NaN;
    if (kind === "advantage") return this.advantage ?? NaN;
    return kind === "version" ? segment.versions[at] : segment.logprobs[at];
  }

  colour(kind) {
    let low = Infinity;
    let high = -Infinity;
    for (const { at: [segment, at] } of this.spans) {
      const value = this.#value(segment, at, kind);
      if (value < low) low = value;
      if (value > high) high = value;
    }
    if (kind === "logprob") [low, high] = [Math.max(low, -8), 0];
    if (kind === "advantage") [low, high] = [-Math.abs(low), Math.abs(low)];
    if (kind === "mask") [low, high] = [0, 1];
    for (const span of this.spans) {
      const value = this.#value(...span.at, kind);
      const share = high > low ? (value - low) / (high - low) : 1;
      span.className = Number.isNaN(value) ? "given" : `${kind === "advantage" ? "d" : "c"}${Math.min(LEVELS - 1, Math.max(0, Math.floor(share * LEVELS)))}`;
    }
    this.strip.dataset.colouring = kind;
    this.legend.textContent = Number.isFinite(low)
      ? `${number(low)} (light) to ${number(high)} (dark); grey tokens were given, not sampled`
      : "nothing is known of these tokens";
  }

  #point(event) {
    if (event.target.at === undefined) return;
    const [segment, at] = event.target.at;
    const sampled = segment.mask[at] ? `version ${segment.versions[at]}, log-prob ${number(segment.logprobs[at])}` : "given, not sampled";
    this.about.textContent = `token ${at}: id ${segment.tokens[at]}, ${sampled}`;
  }
}
