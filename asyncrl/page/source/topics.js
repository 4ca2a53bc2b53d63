// The topics that the page reads, and how their messages are decoded.

import { decode, ExtensionCodec } from "@msgpack/msgpack";

// Name of each topic: its stream, whether its subject ends with a key, and the wildcard for it.
export const TOPICS = {
  "run.state": { stream: "VITALS" },
  "run.history": { stream: "HISTORY", key: ".*" },
  "vitals.taken": { stream: "VITALS", key: ".*" },
  "batch.trained": { stream: "TRAINING" },
  "weights.published": { stream: "TRAINING" },
  "checkpoint.saved": { stream: "TRAINING" },
  "engine.updating": { stream: "ENGINES", key: ".*" },
  "engine.ready": { stream: "ENGINES", key: ".*" },
  "actor.started": { stream: "ACTORS", key: ".*" },
  "actor.stopped": { stream: "ACTORS", key: ".*" },
  "eval.scored": { stream: "BATCHES" },
  "batch.packed": { stream: "BATCHES" },
  "trajectory.graded": { stream: "GRADES", key: ".*" },
  "turn.started": { stream: "TURNS", key: ".*", monitor: true, headers: true },
  "turn.finished": { stream: "TURNS", key: ".*", monitor: true, headers: true },
  "turn.judged": { stream: "TURNS", key: ".*", monitor: true, headers: true },
  "feedback.given": { stream: "TURNS", key: ".*", monitor: true, headers: true },
};

export function streamOf(run, stream) {
  return `ASYNCRL_${run}_${stream}`;
}

export function patternOf(run, name) {
  return `asyncrl.${run}.${name}${TOPICS[name].key ?? ""}`;
}

const extensions = new ExtensionCodec();
const NUMBERS = /:\s*(-?)(NaN|Infinity)/g;

/** Decode the body of a message: JSON, or MessagePack, whose maps never begin with a brace. */
export function decoded(data) {
  if (data.length === 0) return {};
  if (data[0] !== 0x7b) return decode(data, { extensionCodec: extensions });
  const text = new TextDecoder().decode(data);
  try {
    return JSON.parse(text);
  } catch {
    return JSON.parse(text.replace(NUMBERS, ": null"));
  }
}

/** The numbers of an array on the wire: raw little-endian bytes. */
export function arrayOf(Kind, bytes) {
  if (!(bytes instanceof Uint8Array)) return new Kind(0);
  const copy = bytes.slice();
  return new Kind(copy.buffer, 0, Math.floor(copy.byteLength / Kind.BYTES_PER_ELEMENT));
}

const ALIASES = {
  reward_mean: "reward/mean",
  reward_std: "reward/std",
  response_tokens_mean: "response_length/mean",
  response_tokens_max: "response_length/max",
  lag_mean_versions: "lag/mean",
  tokens_per_s: "throughput/tokens_per_s",
  wasted_token_share: "waste/share",
};

export function named(figures) {
  return Object.fromEntries(Object.entries(figures ?? {}).map(([name, value]) => [ALIASES[name] ?? name, value]));
}
