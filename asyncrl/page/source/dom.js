// Elements of the page. Data reaches the page as text nodes and attributes alone, never as markup.

const MOST = 20_000; // characters of one text that are shown at first
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;

/** Make characters visible that would hide or reorder others: terminal codes and bidirectional controls. */
export function visible(text) {
  return String(text).replace(CONTROLS, (one) => {
    const code = one.codePointAt(0);
    return code < 0x20 ? String.fromCodePoint(0x2400 + code) : `<U+${code.toString(16).toUpperCase().padStart(4, "0")}>`;
  });
}

/** Make an element. Attributes that are functions are listeners; children are elements or texts. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined).map(nodeOf));
  return element;
}

function nodeOf(child) {
  return child instanceof Node ? child : document.createTextNode(visible(child));
}

/** Set the text of an element if it differs. */
export function setText(element, text) {
  const wanted = visible(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** A block of text of any length: the beginning, and a button for more of it. */
export function longText(text, attributes = {}) {
  const whole = String(text);
  const block = h("pre", { class: "text", ...attributes });
  let shown = 0;
  const more = h("button", { type: "button", click: () => add(10 * MOST) });
  const box = h("div", {}, block, more);
  function add(count) {
    block.append(document.createTextNode(visible(whole.slice(shown, shown + count))));
    shown = Math.min(whole.length, shown + count);
    more.hidden = shown === whole.length;
    more.textContent = `show more (${shown.toLocaleString("en")} of ${whole.length.toLocaleString("en")} characters)`;
  }
  add(MOST);
  return box;
}

/** Write a number for people: few digits, no loss for counts. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return size >= 0.001 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

export function percent(share) {
  return typeof share === "number" && Number.isFinite(share) ? `${number(Math.round(share * 1000) / 10)} %` : "–";
}

export function seconds(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value < 60) return `${number(Math.round(value * 10) / 10)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function clock(ms) {
  return Number.isFinite(ms) ? new Date(ms).toLocaleTimeString("en-GB") : "–";
}

/** A list of choices with a label. */
export function choice(label, options, chosen, onChange) {
  const select = h("select", { change: () => onChange(select.value) },
    options.map(([value, text]) => h("option", { value, selected: value === chosen }, text)));
  return h("label", { class: "choice" }, `${label} `, select);
}
