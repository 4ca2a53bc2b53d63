// A growing table of numbers: one column for each name, one row for each step or moment.

export class Columns {
  constructor(most) {
    this.most = most; // rows; beyond them every second row of the older half is left out
    this.length = 0;
    this.columns = new Map();
    this.counts = new Map(); // numbers in each column
    this.capacity = 1024;
    this.version = 0; // rises with each change
  }

  /** Add a row; values that are no numbers are missing. */
  push(row) {
    if (this.length === this.most) this.#thin();
    if (this.length === this.capacity) this.#grow();
    this.length += 1;
    this.merge(row);
  }

  /** Add values to the newest row. */
  merge(row) {
    this.set(this.length - 1, row);
  }

  set(at, row) {
    for (const [name, value] of Object.entries(row)) {
      if (typeof value !== "number" && typeof value !== "bigint") continue;
      let column = this.columns.get(name);
      if (column === undefined) {
        column = new Float64Array(this.capacity).fill(NaN);
        this.columns.set(name, column);
      }
      if (Number.isNaN(column[at])) this.counts.set(name, (this.counts.get(name) ?? 0) + 1);
      column[at] = Number(value);
    }
    this.version += 1;
  }

  /** Leave out the rows from one on. */
  cut(length) {
    for (const column of this.columns.values()) column.fill(NaN, length, this.length);
    this.length = length;
    this.#recount();
    this.version += 1;
  }

  get(name, at) {
    const column = this.columns.get(name);
    return column === undefined || at < 0 || at >= this.length ? NaN : column[at];
  }

  last(name) {
    return this.get(name, this.length - 1);
  }

  /** The newest value of a column that is a number. */
  newest(name) {
    for (let at = this.length - 1; at >= 0; at -= 1) {
      const value = this.get(name, at);
      if (Number.isFinite(value)) return value;
    }
    return NaN;
  }

  /** The place of the first number of a column. */
  first(name) {
    const column = this.columns.get(name);
    let at = 0;
    while (column !== undefined && at < this.length && !Number.isFinite(column[at])) at += 1;
    return at;
  }

  /** The values of a column for a chart, from a row on: null where there are none. */
  values(name, from = 0) {
    const column = this.columns.get(name);
    const found = new Array(Math.max(0, this.length - from));
    for (let at = from; at < this.length; at += 1) {
      const value = column === undefined ? NaN : column[at];
      found[at - from] = Number.isFinite(value) ? value : null;
    }
    return found;
  }

  /** The first row whose value in a rising column is at least this. */
  find(name, value) {
    let low = 0;
    let high = this.length;
    const column = this.columns.get(name);
    while (low < high) {
      const middle = (low + high) >> 1;
      if (column[middle] < value) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  names() {
    return [...this.columns.keys()].sort();
  }

  #grow() {
    this.capacity = Math.min(this.most, this.capacity * 2);
    for (const [name, column] of this.columns) {
      const larger = new Float64Array(this.capacity).fill(NaN);
      larger.set(column.subarray(0, this.length));
      this.columns.set(name, larger);
    }
  }

  #thin() {
    const half = this.length >> 1;
    const kept = half >> 1;
    for (const column of this.columns.values()) {
      for (let at = 0; at < kept; at += 1) column[at] = column[2 * at];
      column.copyWithin(kept, 2 * kept, this.length);
      column.fill(NaN, this.length - kept, this.length);
    }
    this.length -= kept;
    this.#recount();
  }

  #recount() {
    for (const [name, column] of this.columns) {
      let count = 0;
      for (let at = 0; at < this.length; at += 1) count += Number.isNaN(column[at]) ? 0 : 1;
      this.counts.set(name, count);
    }
  }
}
