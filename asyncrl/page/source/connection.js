// The run's topics, read from the websocket of its NATS server.

import { wsconnect } from "@nats-io/nats-core";
import { jetstream } from "@nats-io/jetstream";
import { TOPICS, decoded, patternOf, streamOf } from "./topics.js";

const AHEAD = 4_000; // messages that the server sends before more are asked for
const AWAY_MS = 500; // between two tries to connect again
const CHUNKS_AT_ONCE = 8;

export class Connection {
  /** `onState` gets a word for people, and whether the page is up to date. */
  constructor(login, store, onState) {
    this.login = login;
    this.store = store;
    this.onState = onState;
    this.reading = new Map(); // by topic
    this.left = new Map(); // sequence of the newest message of topics that are read no more
    this.refused = new Set(); // topics that the login may not read
  }

  async open() {
    const { servers, user, password, run } = this.login;
    this.onState("connecting", false);
    try {
      this.nc = await wsconnect({
        servers,
        ...(user ? { user, pass: password } : {}),
        name: `page of ${run}`,
        inboxPrefix: `_INBOX.${user.replace(/[^a-zA-Z0-9-]/g, "_") || "asyncrl"}`,
        reconnect: true,
        maxReconnectAttempts: -1,
        reconnectTimeWait: AWAY_MS,
        reconnectJitter: AWAY_MS,
        waitOnFirstConnect: true,
        ignoreAuthErrorAbort: false,
      });
    } catch (error) {
      this.onState(refusal(error), false);
      return false;
    }
    this.js = jetstream(this.nc, { domain: this.login.domain || undefined });
    this.onState("live", true);
    this.#watch();
    this.nc.closed().then((error) => this.onState(refusal(error), false));
    return true;
  }

  async #watch() {
    for await (const status of this.nc.status()) {
      if (status.type === "disconnect" || status.type === "reconnecting") {
        this.onState("the server is away; the page waits for it", false);
      } else if (status.type === "reconnect") {
        this.onState("live", true);
        for (const reader of this.reading.values()) this.#start(reader);
      }
    }
  }

  /** Read a topic from now on. `start`: "all", "newest" of each key, or a number of the newest messages of its stream. */
  follow(name, start = "all") {
    if (this.reading.has(name) || this.refused.has(name)) return;
    if (TOPICS[name].monitor && this.login.role === "observer") {
      this.refused.add(name);
      return;
    }
    const reader = { name, start, last: this.left.get(name) ?? 0, generation: 0 };
    this.reading.set(name, reader);
    this.#start(reader);
  }

  leave(name) {
    const reader = this.reading.get(name);
    this.reading.delete(name);
    if (reader === undefined) return;
    this.left.set(name, reader.last);
    this.#stop(reader);
  }

  #stop(reader) {
    reader.generation += 1;
    reader.messages?.stop();
    reader.messages = undefined;
  }

  async #start(reader) {
    this.#stop(reader);
    const generation = reader.generation;
    const { stream, headers } = TOPICS[reader.name];
    const full = streamOf(this.login.run, stream);
    try {
      const options = { filter_subjects: patternOf(this.login.run, reader.name), inactive_threshold: 60_000 };
      Object.assign(options, await this.#from(reader, full));
      if (headers) options.headers_only = true;
      const consumer = await this.js.consumers.get(full, options);
      if (generation !== reader.generation) return;
      reader.messages = await consumer.consume({
        max_messages: AHEAD,
        callback: (message) => this.#take(reader, message),
      });
    } catch (error) {
      if (generation !== reader.generation) return;
      if (/permission/i.test(String(error))) {
        this.refused.add(reader.name);
        this.reading.delete(reader.name);
      } else if (!/not found/i.test(String(error)) && !this.nc.isClosed()) {
        setTimeout(() => generation === reader.generation && this.#start(reader), 2 * AWAY_MS);
      }
    }
  }

  async #from(reader, full) {
    if (reader.start === "newest") return { deliver_policy: "last_per_subject" };
    if (reader.last) return { deliver_policy: "by_start_sequence", opt_start_seq: reader.last + 1 };
    if (reader.start === "all") return { deliver_policy: "all" };
    const info = await this.#call(`STREAM.INFO.${full}`, {});
    const first = Math.max(info.state.first_seq, info.state.last_seq - reader.start + 1);
    return { deliver_policy: "by_start_sequence", opt_start_seq: Math.max(1, first) };
  }

  #take(reader, message) {
    const { info, subject } = message;
    reader.last = info.streamSequence;
    const headers = {};
    for (const name of message.headers?.keys() ?? []) headers[name] = message.headers.get(name);
    const meta = { time: info.timestampNanos / 1e6, sequence: reader.last, key: subject.split(".").at(-1), headers };
    try {
      if (headers.blob === undefined || TOPICS[reader.name].headers) {
        this.store.take(reader.name, TOPICS[reader.name].headers ? {} : decoded(message.data), meta);
      } else {
        this.#body(headers.blob, reader.name === "batch.packed" ? "kept" : "stored").then((body) =>
          this.store.take(reader.name, decoded(body), meta)).catch(() => {});
      }
    } catch (error) {
      console.warn(`${reader.name} ${reader.last} cannot be read`, error);
    }
  }

  async #call(subject, body) {
    const prefix = this.login.domain ? `$JS.${this.login.domain}.API` : "$JS.API";
    const answer = await this.nc.request(`${prefix}.${subject}`, JSON.stringify(body), { timeout: 10_000 });
    return JSON.parse(new TextDecoder().decode(answer.data));
  }

  /** Read a stored message; null if it was trimmed. */
  async #get(stream, query) {
    const full = streamOf(this.login.run, stream);
    const prefix = this.login.domain ? `$JS.${this.login.domain}.API` : "$JS.API";
    const answer = await this.nc.request(`${prefix}.DIRECT.GET.${full}`, JSON.stringify(query), { timeout: 10_000 });
    return answer.headers?.code >= 400 ? null : answer;
  }

  async #body(reference, kind) {
    const [blob, , , count] = reference.split(":");
    const chunks = [];
    for (let first = 0; first < Number(count); first += CHUNKS_AT_ONCE) {
      const wanted = [...Array(Math.min(CHUNKS_AT_ONCE, count - first)).keys()];
      chunks.push(...await Promise.all(wanted.map((at) => this.#get(kind === "kept" ? "LEDGER_BLOBS" : "BLOBS", {
        last_by_subj: `asyncrl.${this.login.run}.blob.${kind}.${blob}-${first + at}`,
      }))));
    }
    if (chunks.some((chunk) => chunk === null)) throw new Error("its body was trimmed");
    return new Uint8Array(await new Blob(chunks.map((chunk) => chunk.data)).arrayBuffer());
  }

  /** Read the tokens of a trajectory; null if they were trimmed. */
  async trajectory(sequence) {
    const record = await this.#get("TRAJECTORIES", { seq: sequence });
    if (record === null) return null;
    if (record.headers?.get("secret")) throw new Error("it is a turn of live traffic, encrypted under its data key");
    const reference = record.headers?.get("blob");
    return decoded(reference ? await this.#body(reference, "stored") : record.data);
  }
}

function refusal(error) {
  if (/authorization|authentication|permissions/i.test(String(error))) {
    return "the server refuses this login: it is wrong, or it was revoked";
  }
  return error ? `the connection has ended: ${error.message ?? error}` : "the connection has ended";
}
