// The data inside a report: records of the run's topics, compressed.

import { decode } from "@msgpack/msgpack";
import { decoded } from "./topics.js";

const DATA = /<script type="application\/octet-stream" id="data">([A-Za-z0-9+/=]*)<\/script>/;

/** The records in the text of a page. */
export async function recordsIn(html) {
  const found = DATA.exec(html);
  if (found === null || found[1] === "") throw new Error("it is no report of a run");
  return recordsOf(found[1]);
}

/** The records of the data of a report, in the order of time: topic, message and meta each. */
export async function recordsOf(base64) {
  const packed = Uint8Array.from(atob(base64), (one) => one.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const report = decode(new Uint8Array(await new Response(stream).arrayBuffer()));
  const records = report.records.map(([topic, key, time, body, headers]) => [topic, decoded(body), { key, time, headers }]);
  return { ...report, records };
}
