// Everything that the page knows of a run. Each kind of facts has a bound, so that its memory does not grow.

import { Columns } from "./columns.js";
import { named } from "./topics.js";

const MOST_STEPS = 40_000;
const MOST_MOMENTS = 8_000;
const MOST_EVENTS = 4_000;
const MOST_TRAJECTORIES = 5_000;
const MOST_TURNS = 2_000;

export class Store {
  constructor() {
    this.run = "";
    this.status = null;
    this.steps = new Columns(MOST_STEPS);
    this.moments = new Columns(MOST_MOMENTS);
    this.actors = new Map(); // newest vital signs, by actor
    this.trajectories = new Map(); // by name, the oldest first
    this.turns = new Map();
    this.spans = []; // updates of engines and lives of actors, for the timeline
    this.marks = []; // versions, checkpoints, evaluations
    this.open = new Map(); // begin of each span that has not ended
    this.pieces = null; // text of each token, where the page knows it
    this.messages = 0;
    this.changed = new Set(); // kinds of facts since the views last looked
  }

  /** Take a message of a topic. `meta` has its time (ms), sequence, key and headers. */
  take(topic, message, meta) {
    const handler = HANDLERS[topic];
    if (handler === undefined) return; // of a newer version of the program
    this.messages += 1;
    handler(this, message, meta);
  }

  #bounded(list, item) {
    list.push(item);
    if (list.length > MOST_EVENTS) list.splice(0, MOST_EVENTS >> 2);
  }

  addSpan(span) {
    this.#bounded(this.spans, span);
    this.changed.add("timeline");
  }

  addMark(mark) {
    this.#bounded(this.marks, mark);
    this.changed.add("timeline");
  }

  begin(kind, name, at) {
    this.open.set(`${kind} ${name}`, { kind, name, at });
    this.changed.add("timeline");
  }

  end(kind, name, at, about = "") {
    const opened = this.open.get(`${kind} ${name}`);
    if (opened === undefined) return;
    this.open.delete(`${kind} ${name}`);
    this.addSpan({ kind, name, from: opened.at, to: at, about });
  }

  trajectory(name) {
    let found = this.trajectories.get(name);
    if (found === undefined) {
      found = { name };
      this.trajectories.set(name, found);
      if (this.trajectories.size > MOST_TRAJECTORIES) this.trajectories.delete(this.trajectories.keys().next().value);
    }
    this.changed.add("trajectories");
    return found;
  }

  turn(name) {
    let found = this.turns.get(name);
    if (found === undefined) {
      found = { name };
      this.turns.set(name, found);
      if (this.turns.size > MOST_TURNS) this.turns.delete(this.turns.keys().next().value);
    }
    this.changed.add("live");
    return found;
  }

  /** Take the metrics of a step: a step that was trained again replaces those from it on. */
  takeStep(step, row) {
    const steps = this.steps;
    if (steps.length && step <= steps.last("step")) steps.cut(steps.find("step", step));
    steps.push({ ...row, step });
    this.changed.add("steps");
  }
}

const HANDLERS = {
  "run.state"(store, message) {
    store.status = message;
    store.changed.add("status");
    for (const actor of message.actors ?? []) {
      if (store.actors.get(actor.actor_id)?.ofState === false) continue; // its vital signs are newer
      const { actor_id, role, pid, vitals: values } = actor;
      store.actors.set(actor_id, { actor_id, role, pid, values, at_s: message.at_s - (actor.silent_s ?? 0), ofState: true });
      store.changed.add("actors");
    }
    const at = store.steps.length - 1;
    if (typeof message.step === "number" && store.steps.get("step", at) === message.step) {
      store.steps.set(at, message.metrics ?? {});
      store.changed.add("steps");
    }
  },

  "run.history"(store, message) {
    const moments = store.moments;
    if (moments.length && message.at_s <= moments.last("at_s")) return; // the same moment, for another length of time
    const row = { at_s: message.at_s, step: message.step, version: message.version, ...message.metrics };
    for (const part of ["per_s", "waiting", "under_way", "stream_shares", "cores", "live"]) {
      for (const [name, value] of Object.entries(message[part] ?? {})) row[`${part}/${name}`] = value;
    }
    for (const [pool, gauges] of Object.entries(message.gauges ?? {})) {
      for (const [name, value] of Object.entries(gauges)) row[`${name}/${pool}`] = value;
    }
    for (const [state, count] of Object.entries(message.engines ?? {})) row[`engines/${state}`] = count;
    moments.push({ ...row, open_groups: message.open_groups, ready_groups: message.ready_groups });
    store.changed.add("moments");
  },

  "vitals.taken"(store, message, meta) {
    store.actors.set(message.actor_id ?? meta.key, { ...message, ofState: false });
    store.changed.add("actors");
  },

  "batch.trained"(store, message, meta) {
    const lags = Object.entries(message.lags ?? {}).filter(([lag]) => Number(lag) >= 0);
    const tokens = lags.reduce((sum, [, count]) => sum + count, 0);
    const row = { ...named(message.metrics), time: meta.time, trajectories: message.trajectories, masked: message.masked };
    if (message.stage === "rl" && message.rewards?.length > 1) {
      [row["reward/mean"], row["reward/std"]] = message.rewards;
      row.tokens = tokens;
      if (tokens) row["lag/mean"] = lags.reduce((sum, [lag, count]) => sum + lag * count, 0) / tokens;
    }
    store.takeStep(message.step, row);
  },

  // A row of metrics.jsonl, in a report: it also has the figures of the batch.
  "metrics.row"(store, message) {
    const at = store.steps.length ? store.steps.find("step", message.step) : 0;
    if (at >= store.steps.length || store.steps.get("step", at) !== message.step) return;
    const { "reward/mean": mean, "reward/std": std, ...rest } = named(message);
    store.steps.set(at, message.stage === "rl" ? { ...rest, "reward/mean": mean, "reward/std": std } : rest);
  },

  "weights.published"(store, message, meta) {
    store.addMark({ kind: "version", at: meta.time, text: `version ${message.version} published` });
  },

  "checkpoint.saved"(store, message, meta) {
    store.addMark({ kind: "checkpoint", at: meta.time, text: `checkpoint of step ${message.step} saved` });
  },

  "eval.scored"(store, message, meta) {
    const text = `evaluation of version ${message.version}: ${message.accuracy}`;
    store.addMark({ kind: "evaluation", at: meta.time, text });
  },

  "engine.updating"(store, message, meta) {
    store.begin("update", message.engine_id, meta.time);
  },

  "engine.ready"(store, message, meta) {
    store.end("update", message.engine_id, meta.time, `version ${message.version}`);
  },

  "actor.started"(store, message, meta) {
    if (message.lost) return;
    store.end("life", message.actor_id, meta.time, "killed");
    store.begin("life", message.actor_id, meta.time);
  },

  "actor.stopped"(store, message, meta) {
    store.end("life", message.actor_id, meta.time, message.reason || "asked to stop");
  },

  "trajectory.graded"(store, message, meta) {
    Object.assign(store.trajectory(message.trajectory_id), {
      stage: message.stage,
      reward: message.reward,
      tokens: (message.versions ?? []).reduce((sum, one) => sum + one.tokens, 0),
      versions: (message.versions ?? []).map((one) => one.version),
      truncated: message.truncated === true,
      sequence: message.payload?.sequence,
      time: meta.time,
    });
  },

  "batch.packed"(store, message) {
    for (const group of message.groups ?? []) {
      const advantages = advantagesOf(group);
      group.members.forEach((member, at) => {
        const found = store.trajectories.get(member.trajectory_id);
        if (found === undefined) return;
        found.step = message.step;
        found.advantage = advantages[at];
        store.changed.add("trajectories");
      });
    }
  },

  // The tokens of a trajectory, in a report.
  "trajectory.generated"(store, message) {
    store.trajectory(message.trajectory_id).generated = message;
  },

  "turn.started"(store, _message, { headers, key, time }) {
    const turn = store.turn(key);
    Object.assign(turn, { time, session: headers.session, tenant: headers.tenant, skip: headers.skip ?? "" });
    turn.promptTokens = Number(headers["prompt-tokens"] ?? 0);
  },

  "turn.finished"(store, _message, { headers, key, time }) {
    const turn = store.turn(key);
    Object.assign(turn, { ended: time, finish: headers.finish, tokens: Number(headers.tokens ?? 0) });
    Object.assign(turn, { version: Number(headers.newest ?? 0), marks: headers.marks ?? "" });
  },

  "turn.judged"(store, _message, { headers, key }) {
    store.turn(key).reward = headers.reward === undefined ? null : Number(headers.reward);
  },

  "feedback.given"(store, _message, { headers, key }) {
    store.turn(key).feedback = Number(headers.score);
  },
};

/** Rewards less the mean of their group; of the estimator `grpo` divided by their standard deviation. */
function advantagesOf(group) {
  const rewards = group.members.map((member) => member.reward);
  const mean = rewards.reduce((sum, one) => sum + one, 0) / (rewards.length || 1);
  const centered = rewards.map((one) => one - mean);
  if (group.estimator !== "grpo" || rewards.length < 2) return centered;
  const spread = Math.sqrt(centered.reduce((sum, one) => sum + one * one, 0) / (rewards.length - 1));
  return centered.map((one) => one / (spread + 1e-6));
}
